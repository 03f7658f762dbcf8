"""A film as a file that can be played while it grows, by FFmpeg: VP9 in WebM or in fragmented MP4, H.264 in fragmented MP4, with sound as
Opus. The encoders work in the calling thread and make none of their own.

The pieces that follow the file's head, fragments of MP4 (ISO/IEC 14496-12) and clusters of WebM (RFC 9559), are made here: FFmpeg's own
pieces are complete only with the next frame, and have wrong times if sound lies between frames."""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from typing import Any, NamedTuple

import av
import numpy as np
from av.video.frame import PictureType
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc, VideoReformatter
from numpy.typing import NDArray

MOOF_IS_BASE = 0x020000
RUN_SAYS = 0x000701
"""The contents of a run: the place of its data, and for each sample its duration, size and flags."""
KEY_SAMPLE, DEPENDENT_SAMPLE = 0x02000000, 0x01010000
EBML_KEY = 0x80


class EncodedSample(NamedTuple):
    """A frame or packet of sound as an encoder made it. track: from 1 on, as in the file's head. time, duration: in the track's ticks."""

    track: int
    time: int
    duration: int
    is_key: bool  # Whether a player needs no earlier samples for it.
    data: bytes


Wrap = Callable[[int, Sequence[EncodedSample]], bytes]
"""Makes a piece of a file. Takes the number of the piece, from 1 on, and its samples, ordered by track and then by time."""


def fragment(number: int, samples: Sequence[EncodedSample]) -> bytes:
    """A fragment of MP4 with these samples, as Wrap says. Times are not negative."""
    tracks = [(track, list(group)) for track, group in groupby(samples, key=lambda sample: sample.track)]
    blank = _moof(number, tracks, 0)  # As long as with the real offset.
    moof = _moof(number, tracks, len(blank) + 8)  # The box of the samples has a head of 8 bytes.
    return moof + _box(b"mdat", b"".join(sample.data for sample in samples))


def _moof(number: int, tracks: Sequence[tuple[int, Sequence[EncodedSample]]], offset: int) -> bytes:
    """The head of a fragment. tracks: number and samples of each. offset: place of the first sample, counted from this head on."""
    parts = [_box(b"mfhd", struct.pack(">II", 0, number))]
    for track, samples in tracks:
        head = struct.pack(">II", MOOF_IS_BASE, track)
        begin = struct.pack(">IQ", 1 << 24, samples[0].time)  # Version 1 of this box, whose time has 64 bits.
        run = struct.pack(">III", RUN_SAYS, len(samples), offset)
        run += b"".join(struct.pack(">III", one.duration, len(one.data), KEY_SAMPLE if one.is_key else DEPENDENT_SAMPLE) for one in samples)
        parts.append(_box(b"traf", _box(b"tfhd", head) + _box(b"tfdt", begin) + _box(b"trun", run)))
        offset += sum(len(one.data) for one in samples)
    return _box(b"moof", b"".join(parts))


def _box(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", 8 + len(body)) + name + body


def cluster(number: int, samples: Sequence[EncodedSample]) -> bytes:
    """A cluster of WebM with these samples, as Wrap says, by time, as browsers need it. Times are milliseconds, at most 32 s apart."""
    by_time = sorted(samples, key=lambda sample: sample.time)
    begin = by_time[0].time
    elements = [_element(0xE7, begin.to_bytes(8))]  # Timestamp
    for sample in by_time:
        # 0x80: the mark of a number of one byte.
        head = struct.pack(">BhB", 0x80 | sample.track, sample.time - begin, EBML_KEY if sample.is_key else 0)
        elements.append(_element(0xA3, head + sample.data))  # SimpleBlock
    return _element(0x1F43B675, b"".join(elements))  # Cluster


def _element(name: int, body: bytes) -> bytes:
    # The highest bit that is set in the size marks it as a number of 8 bytes.
    return name.to_bytes((name.bit_length() + 7) // 8) + (1 << 56 | len(body)).to_bytes(8) + body


def with_lengths(data: bytes) -> bytes:
    """A frame of H.264 as MP4 has it: each unit begins with its length, in place of a mark (three bytes that no unit contains)."""
    units = [unit.rstrip(b"\x00") for unit in data.split(b"\x00\x00\x01")]
    return b"".join(struct.pack(">I", len(unit)) + unit for unit in units if unit)


RATE_TICKS = 1001
"""Rates are fractions with at most this denominator, as the rates of television are."""
MIN_RATE_HZ, MAX_RATE_HZ = 0.1, 120.0
OPUS_HZ = 48_000
WEBM, MP4 = "video/webm", "video/mp4"
MEDIA_TYPE = re.compile(r'(?P<type>video/[a-z0-9.+-]+)\s*(?:;\s*codecs\s*=\s*(?:"(?P<quoted>[^"]*)"|(?P<bare>[^\s";]+))\s*)?')


@dataclass(frozen=True, slots=True, eq=False)
class FilmKind:
    """A codec in a container. media_type: type of the file. request_type: the media type that asks for just this kind. name: the
    codec's name, for people. codecs: beginnings of the names of this codec in media types (RFC 6381). multiple: sides are padded to
    multiples of this number of pixels, by repeated edges. encoder, options: name and options of FFmpeg's encoder, which waits for no later
    frames. packed: turns an encoded frame into the form of the container. wrap: makes a piece of the file."""

    media_type: str
    request_type: str
    name: str
    codecs: tuple[str, ...]
    multiple: int
    encoder: str
    options: Mapping[str, str]
    packed: Callable[[bytes], bytes]
    wrap: Wrap

    @property
    def is_there(self) -> bool:
        """Whether this FFmpeg can encode the kind."""
        return self.encoder in av.codecs_available


_VP9_CODECS = ("vp9", "vp09")
_LIBVPX = {"deadline": "realtime", "cpu-used": "5", "crf": "24", "b": "0", "lag-in-frames": "0", "auto-alt-ref": "0"}
VP9 = FilmKind(WEBM, WEBM, "VP9", _VP9_CODECS, 1, "libvpx-vp9", _LIBVPX, bytes, cluster)
VP9_MP4 = FilmKind(MP4, MP4, "VP9", _VP9_CODECS, 1, "libvpx-vp9", _LIBVPX, bytes, fragment)
H264 = FilmKind(
    MP4,
    f'{MP4}; codecs="avc1"',
    "H.264",
    ("avc1", "h264"),
    2,
    "libx264",
    {"preset": "faster", "crf": "20", "tune": "zerolatency", "forced-idr": "1"},
    with_lengths,
    fragment,
)
KINDS = (VP9, VP9_MP4, H264)
"""The first kind of a media type is meant if a request names no codec; the first kind of all if it names no type."""


def film_kind(media_type: str) -> FilmKind | None:
    """The kind of film that a client's media type asks for; None if no such kind is made."""
    if not media_type:
        return KINDS[0]
    match = MEDIA_TYPE.fullmatch(media_type.strip().lower())
    if match is None:
        return None
    codecs = [codec.strip() for codec in (match["quoted"] or match["bare"] or "").split(",")]
    video_codecs = [codec for codec in codecs if codec not in ("", "opus")]
    kinds = [kind for kind in KINDS if kind.media_type == match["type"]]
    return next((kind for kind in kinds if all(codec.startswith(kind.codecs) for codec in video_codecs)), None)


class Track(NamedTuple):
    """The sound of a film. samples: [samples, 1 or 2 channels], -1 to 1."""

    samples: NDArray[np.float32]
    rate_hz: int  # Samples a second.


class FilmPiece(NamedTuple):
    """The next bytes of the file. frames: number of frames that can be shown once the piece is there, at least one."""

    data: bytes
    frames: int


def encoders() -> str:
    """The versions of the libraries: together with its frames they decide the bytes of a file."""
    return f"PyAV {av.__version__} FFmpeg {av.ffmpeg_version_info}"


def told_kinds() -> str:
    """The kinds that can be made here, for the text of an error."""
    names = [f"{kind.request_type} ({kind.name})" for kind in KINDS if kind.is_there]
    return ", ".join(names) or "none, for FFmpeg has no encoder of films here"


class FilmWriter:
    """Encodes a film frame by frame into pieces of a file. The file can be cut after each piece, and plays up to there. The same frames
    make the same pieces on the same machine. The memory in use does not grow with the film."""

    def __init__(self, kind: FilmKind, rate_hz: float, frames: int, track: Track | None = None) -> None:
        """rate_hz: frames a second. frames: number of all frames, at least one. track: the sound. Raises ValueError without an encoder."""
        self._video: Any = None
        if not kind.is_there:
            raise ValueError(f"FFmpeg has no {kind.encoder} here, which {kind.name} needs")
        self._kind, self._frames, self._track = kind, frames, track
        self._rate = Fraction(rate_hz).limit_denominator(RATE_TICKS)
        self._colours = VideoReformatter()
        self._head, self._codec = b"", ""
        self._samples: list[EncodedSample] = []
        self._frames_written = self._samples_written = self._pieces_made = 0
        self._audio: Any = None
        self._first_time: int | None = None  # Time of the first packet of sound, which the encoder puts below 0.

    @property
    def codecs(self) -> str:
        """The codecs, such as "vp09.00.30.08, opus", which a browser needs first (RFC 6381); empty before the first frame."""
        return ", ".join([self._codec] + ["opus"] * (self._audio is not None))

    def write(self, pixels: NDArray[np.uint8], *, is_key: bool = False) -> FilmPiece | None:
        """Encode the next frame. Returns the piece of the file that is complete with it, if any; with the last frame, all that is left.
        pixels: [height, width, 3], RGB; all frames have one size. is_key: whether the frame must not depend on earlier frames."""
        pixels = self._padded(pixels)
        if self._video is None:
            self._open(*pixels.shape[:2])
        frame = self._colours.reformat(
            av.VideoFrame.from_ndarray(pixels, format="rgb24"),
            format="yuv420p",
            dst_colorspace=Colorspace.ITU709,
            dst_color_range=ColorRange.MPEG,
            dst_color_trc=ColorTrc.BT709,
            dst_color_primaries=ColorPrimaries.BT709,
            threads=1,
        )
        frame.pts, frame.time_base = self._frames_written, 1 / self._rate
        if is_key:
            frame.pict_type = PictureType.I
        self._frames_written += 1
        is_last = self._frames_written == self._frames
        packets = self._video.encode(frame)
        if is_last:
            packets += self._video.encode(None)
        self._samples += [self._sample(packet, self._video, 1, self._kind.packed) for packet in packets] + self._encode_sound(is_last)
        if not packets:
            return None
        self._pieces_made += 1
        samples, self._samples = sorted(self._samples, key=lambda sample: sample.track), []
        head, self._head = self._head, b""
        return FilmPiece(head + self._kind.wrap(self._pieces_made, samples), len(packets))

    def _open(self, height: int, width: int) -> None:
        """Open the encoders, for frames of this size, and the file, whose head goes out with the first piece."""
        file = _Head()
        form = self._kind.media_type.removeprefix("video/")
        container: Any = av.open(
            file, "w", format=form, container_options={"movflags": "empty_moov+default_base_moof", "fflags": "+bitexact"}
        )
        container.metadata["DURATION"] = _clock(self._frames / self._rate)  # Otherwise a file that grows does not state it.
        stream = container.add_stream(self._kind.encoder, rate=self._rate, options=dict(self._kind.options))
        stream.height, stream.width, stream.pix_fmt, stream.time_base = height, width, "yuv420p", 1 / self._rate
        context = stream.codec_context
        context.thread_count = 1
        context.gop_size = max(round(self._rate), 1)  # Players can only jump to key frames.
        context.flags |= av.codec.context.Flags.bitexact
        context.colorspace, context.color_range = Colorspace.ITU709, ColorRange.MPEG
        context.color_trc, context.color_primaries = ColorTrc.BT709, ColorPrimaries.BT709
        if self._track is not None:
            layout = "mono" if self._track.samples.shape[1] == 1 else "stereo"
            self._audio = container.add_stream("libopus", rate=OPUS_HZ, layout=layout)
            self._audio.codec_context.flags |= av.codec.context.Flags.bitexact
        container.start_encoding()
        self._container, self._video, self._head = container, stream, bytes(file.data)
        self._codec = _codec_word(self._kind, self._head)

    def _sample(self, packet: Any, stream: Any, track: int, packed: Callable[[bytes], bytes]) -> EncodedSample:
        """An encoder's packet as a sample, with times in ticks of the container. packed: as in FilmKind. A frame lasts 1 / rate seconds."""
        time_s, length_s = packet.pts * packet.time_base, packet.duration * packet.time_base or 1 / self._rate
        begin, end = round(time_s / stream.time_base), round((time_s + length_s) / stream.time_base)
        return EncodedSample(track, begin, end - begin, packet.is_keyframe, packed(bytes(packet)))

    def _encode_sound(self, is_last: bool) -> list[EncodedSample]:
        """Encode the sound up to the end of the frames so far; returns its samples. The encoder begins with silence at times below 0, which
        pieces cannot have: all times are moved to begin at 0, and the head states the length of that silence."""
        if self._track is None:
            return []
        samples, rate_hz = self._track
        end = len(samples) if is_last else min(round(self._frames_written / self._rate * rate_hz), len(samples))
        packets: list[Any] = []
        if end > self._samples_written:
            part = np.ascontiguousarray(samples[self._samples_written : end].T)
            frame = av.AudioFrame.from_ndarray(part, format="fltp", layout=self._audio.codec_context.layout.name)
            frame.sample_rate, frame.pts, frame.time_base = rate_hz, self._samples_written, Fraction(1, rate_hz)
            packets += self._audio.encode(frame)
            self._samples_written = end
        if is_last:
            packets += self._audio.encode(None)
        if packets and self._first_time is None:
            self._first_time = packets[0].pts
        for packet in packets:
            packet.pts -= self._first_time
        return [self._sample(packet, self._audio, 2, bytes) for packet in packets]

    def _padded(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        rows, columns = (-side % self._kind.multiple for side in pixels.shape[:2])
        return np.pad(pixels, ((0, rows), (0, columns), (0, 0)), "edge") if rows or columns else np.ascontiguousarray(pixels)


class _Head(io.RawIOBase):
    """A file that cannot go back, so that FFmpeg writes the head of a file that grows."""

    def __init__(self) -> None:
        self.data = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.data += data
        return len(data)


def _clock(seconds: Fraction) -> str:
    minutes, rest_ns = divmod(round(seconds * 1_000_000_000), 60 * 1_000_000_000)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{rest_ns // 1_000_000_000:02d}.{rest_ns % 1_000_000_000:09d}"


def _codec_word(kind: FilmKind, head: bytes) -> str:
    """The codec's name in media types (RFC 6381): boxes of MP4 state profile and level; for WebM, browsers take the bare name."""
    if match := re.search(rb"avcC\x01(...)", head, re.DOTALL):
        return f"avc1.{match[1].hex()}"
    if match := re.search(rb"vpcC\x01...(.)(.)", head, re.DOTALL):
        profile, level = match[1][0], match[2][0]
        return f"vp09.{profile:02d}.{level:02d}.08"  # 08: bits of a sample.
    return kind.codecs[0]
