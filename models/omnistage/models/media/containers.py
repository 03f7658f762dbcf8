"""Files of sound and film opened by FFmpeg, which may read no other file. Runs in the decoding process."""

from __future__ import annotations

import io
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, BinaryIO, NoReturn, cast

import av
import av.subtitles.stream  # PyAV would load this module at its first use, when no file can be opened any more
from av.container import InputContainer
from av.format import Flags

from omnistage.models.media import faults
from omnistage.models.media.errors import BadMedia
from omnistage.models.media.limits import MediaLimits

FORMATS = (
    *("mov", "mp4", "m4a", "3gp", "matroska", "webm", "avi", "mpegts", "mpeg", "flv", "ogg", "asf", "gif"),
    *("wav", "w64", "aiff", "au", "caf", "flac", "mp3", "aac", "ac3", "eac3", "amr", "voc", "nistsphere"),
)
"""Formats that are read. Playlists are not among them: they name other files."""

VIDEO_DECODERS = (
    *("h264", "hevc", "libdav1d", "av1", "vp8", "vp9", "mpeg4", "mpeg2video", "mpeg1video", "mjpeg", "flv", "h263", "theora", "gif"),
    *("prores", "wmv1", "wmv2", "wmv3", "vc1", "msmpeg4", "msmpeg4v1", "msmpeg4v2", "rawvideo", "png", "ffv1"),
)
ALPHA_DECODERS = {"vp8": "libvpx", "vp9": "libvpx-vp9"}
"""Decoders of these codecs for a film that says that it has transparency."""
AUDIO_DECODERS = (
    *("aac", "mp3float", "mp3", "mp2float", "mp2", "opus", "libopus", "vorbis", "libvorbis", "flac", "alac", "ac3", "eac3"),
    *("wmav1", "wmav2", "amrnb", "amrwb", "libopencore_amrnb", "libopencore_amrwb", "gsm", "gsm_ms", "speex", "libspeex"),
    *("adpcm_ms", "adpcm_ima_wav", "adpcm_ima_qt", "g726", "g726le"),
    *("pcm_u8", "pcm_s8", "pcm_s16le", "pcm_s16be", "pcm_s24le", "pcm_s24be", "pcm_s32le", "pcm_s32be"),
    *("pcm_f32le", "pcm_f32be", "pcm_f64le", "pcm_f64be", "pcm_alaw", "pcm_mulaw"),
)


STEP_BACK, LEAP = Fraction(1, 10), Fraction(10)
"""Seconds by which times may go back or jump, as in FFmpeg's command. Beyond them another recording begins."""

FOUND_BY_A_MARK = ("mp3float", "mp3", "mp2float", "mp2", "aac", "ac3", "eac3")
"""Decoders of frames that are found by a mark, which other bytes may contain too, and that need the frames before. At a joint of such
sounds, or at the beginning of a recording, some frames cannot be decoded though nothing is damaged."""

UNDECODED = 0.1
"""The part of a sound's frames that these decoders may fail to decode."""


def open_container(file: BinaryIO, limits: MediaLimits) -> InputContainer | None:
    """Open the file from its beginning; None for a file in none of FORMATS. Close the result."""
    file.seek(0)
    options = {
        "protocol_whitelist": "none",
        "format_whitelist": ",".join(FORMATS),
        "codec_whitelist": ",".join((*VIDEO_DECODERS, *AUDIO_DECODERS)),
        "max_pixels": str(limits.film_pixels),
        "threads": "1",
    }
    try:
        return av.open(file, mode="r", options=options, metadata_errors="replace", io_open=_refuse)
    except (av.error.InvalidDataError, av.error.ArgumentError, av.error.EOFError):
        return None


UNTOLD = ("avi",)
"""Formats that state a time for each place in the order of frames, and none for a frame itself: FFmpeg guesses it."""

LISTING = ("mov,mp4,m4a,3gp,3g2,mj2", "avi")


def video_stream(container: InputContainer) -> Any:
    """The film in the file; None if there is none. The default stream goes first, else the largest. The cover of a record is no film."""
    films = [stream for stream in container.streams.video if not stream.disposition & av.stream.Disposition.attached_pic]
    return max(films, key=lambda stream: (_is_default(stream), stream.width * stream.height), default=None)


def sound_stream(container: InputContainer) -> Any:
    """The sound in the file; None if there is none. The default stream goes first, else the stream with the most channels."""
    return max(container.streams.audio, key=lambda stream: (_is_default(stream), stream.channels), default=None)


def _is_default(stream: Any) -> bool:
    return bool(stream.disposition & av.stream.Disposition.default)


def packets(container: InputContainer, *streams: Any) -> Iterator[Any]:
    """Yields the packets of these streams; the last one of each stream is empty. Where recordings were joined, each with its own clock,
    times are moved so that each recording goes on where the last one ended."""
    restarts = bool(container.format.flags & cast(int, Flags.ts_discont.value))
    shift = Fraction(0)
    before: dict[int, tuple[Fraction, Fraction]] = {}
    for packet in container.demux(*streams):
        if restarts and packet.dts is not None and packet.time_base:
            unit, index = packet.time_base, packet.stream_index
            at = packet.dts * unit + shift
            last, step = before.get(index, (at, Fraction(0)))
            if not -STEP_BACK <= at - last - step <= LEAP:
                shift += last + step - at
                at = last + step
            before[index] = at, packet.duration * unit if packet.duration else at - last
            ticks = round(shift / unit)
            packet.dts += ticks
            packet.pts = None if packet.pts is None else packet.pts + ticks
        yield packet


def frames(container: InputContainer, stream: Any, other_stream: Any = None) -> Iterator[Any]:
    """Yields the decoded frames of `stream`, on one clock with `other_stream`. The last packet of a file that was cut off may not decode,
    and is left out then; if an earlier packet does not decode, FFmpeg's error is raised. Decoders of FOUND_BY_A_MARK may lose some packets:
    BadMedia is raised if they lose too many."""
    decoder = _decoder(stream)
    count = undecoded = 0
    broken = None
    for packet in packets(container, stream, *([other_stream] if other_stream else [])):
        if packet.stream.index != stream.index:  # the last, empty packet has no number of its own
            continue
        if broken and packet.size:
            raise broken
        count += bool(packet.size)
        try:
            yield from decoder.decode(packet)
        except av.error.FFmpegError as error:
            if faults.is_memory(error) or faults.is_refusal(error):
                raise
            undecoded += 1
            broken = None if stream.codec_context.name in FOUND_BY_A_MARK else error
    if undecoded > max(UNDECODED * count, 1):
        raise BadMedia(f"{undecoded} of its {count} frames of sound cannot be decoded: it is damaged, encode it anew")


def _decoder(stream: Any) -> Any:
    """A decoder for a stream that `checked_decoder` has checked. Transparent films in VP8 and VP9 need another decoder than FFmpeg's own,
    which do not read the transparency that comes with each packet."""
    checked = stream.codec_context
    seeing = ALPHA_DECODERS.get(checked.name) if stream.metadata.get("alpha_mode") == "1" else None
    if seeing is None:
        return checked
    decoder: Any = av.CodecContext.create(seeing, "r")
    decoder.thread_count, decoder.options = checked.thread_count, checked.options
    return decoder


def check_listed(container: InputContainer, file: BinaryIO) -> None:
    """Raises BadMedia if a file lists pieces that lie after its end. Formats without a list of all their pieces are not checked."""
    if container.format.name not in LISTING:
        return
    place = file.tell()  # FFmpeg goes on reading there.
    size = file.seek(0, io.SEEK_END)
    file.seek(place)
    ends = [entry.pos + entry.size for stream in (*container.streams.video, *container.streams.audio) for entry in stream.index_entries]
    missing = sum(end > size for end in ends)
    if missing:
        raise BadMedia(f"it lists {len(ends)} pieces, and {missing} of them are missing: it was cut off, send all of it")


def checked_decoder(stream: Any, decoder_names: tuple[str, ...], limits: MediaLimits) -> None:
    """Set up a stream's decoder, for one thread, before its first frame. decoder_names: allowed decoders. Raises BadMedia for others."""
    context = stream.codec_context
    if context is None or context.name not in decoder_names:
        name = "unknown" if context is None else context.name
        advice = "WAV, FLAC or MP3, or a film to MP4 with AAC" if stream.type == "audio" else "MP4 with H.264 and AAC"
        raise BadMedia(f"nothing here decodes its codec ({name}): convert it to {advice}")
    context.thread_count = 1
    context.thread_type = "NONE"
    context.options = {"max_pixels": str(limits.film_pixels)}


def _refuse(url: str, flags: int, options: dict[str, str]) -> NoReturn:
    raise BadMedia("it names another file, which is not read: send all of it in one file")
