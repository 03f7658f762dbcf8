"""Files of sound and film: whether all of one has come, and its packets and frames by FFmpeg, which may read no other file. Runs in the
decoding process.

Decoders do not notice a missing end: half of a film is a shorter film. `check_whole` compares the bytes of a file with the length that
its own header states. Formats without a length, such as MPEG-TS and ADTS, cannot be checked. Other signs are checked where they are
read: the list of an MP4 or AVI in `check_listed`; sizes of chunks, as in WAV, and the last page of an Ogg in `sound_files`; frames of an
MP3 and samples of a FLAC in `sounds`."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, BinaryIO, NoReturn, cast

import av
import av.subtitles.stream  # PyAV would load this module at its first use, when no file can be opened any more
from av.container import InputContainer
from av.format import Flags

from omnistage.models.media.confinement import is_memory, is_refusal
from omnistage.models.media.terms import BadMedia, MediaLimits

SLACK = 64
"""Bytes that may be missing: some programs count a head twice."""

BOXES = 10_000
"""How many boxes of an MP4 are looked at, at most: each fragment of a film has some."""

BOX_TYPES = frozenset(
    (b"ftyp", b"styp", b"moov", b"moof", b"mdat", b"mfra", b"meta", b"sidx", b"free", b"skip", b"wide", b"uuid", b"pnot", b"udta")
)
LISTS = frozenset((b"moov", b"moof", b"meta"))
"""Boxes that list media; `meta` is that of pictures."""

BOX_HEAD = 8
"""The fewest bytes of a box: its size and its type."""

EBML, SEGMENT = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"
ASF_HEAD, ASF_FILE = b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", b"\xa1\xdc\xab\x8c\x47\xa9\xcf\x11"
ASF_BYTES = 1 << 16
"""Bytes of the beginning in which the head is looked for."""

ASF_LIVE = 1
"""The flag of a file that was sent while it was made: the size that it states is not its size."""


def check_whole(file: BinaryIO, most_bytes: int) -> None:
    """Raises BadMedia for a file that was cut off. most_bytes: largest size of a file; a larger stated length is not believed."""
    file_bytes = file.seek(0, io.SEEK_END)
    stated_bytes = _stated_bytes(file, most_bytes)
    if file_bytes + SLACK < stated_bytes:
        raise cut_off(stated_bytes, file_bytes)
    if _lacks_list(file, file_bytes):
        raise BadMedia("it has no list of its pieces (moov), which is often its end: it was cut off, send all of it")


def cut_off(stated_bytes: int, file_bytes: int) -> BadMedia:
    """The error for a file that states `stated_bytes` and has only `file_bytes`."""
    return BadMedia(f"it says that it has {stated_bytes} bytes, and {file_bytes} are there: it was cut off, send all of it")


def _stated_bytes(file: BinaryIO, most_bytes: int) -> int:
    """The bytes of the whole file as it states them; 0 if it does not, or if they are more than most_bytes."""
    file.seek(0)
    head = file.read(64).ljust(64, b"\0")
    if head.startswith(b"RIFF") and head[8:12] != b"WAVE":
        return _stated_length(8, struct.unpack_from("<I", head, 4)[0], most_bytes)
    if head.startswith(b".snd"):
        before, count = struct.unpack_from(">II", head, 4)
        return _stated_length(before, count, most_bytes)
    if head.startswith(ASF_HEAD):
        return _asf_bytes(file)
    if head.startswith(EBML):
        return matroska_bytes(file)
    return max((end for _, _, end in boxes(file)), default=0) if _has_boxes(file) else 0


def _stated_length(before: int, count: int, most_bytes: int) -> int:
    """The length that a file states, before + count bytes; 0 for unknown. A program that writes into a pipe cannot know the length: it
    writes no length, or a length that no file may have."""
    return before + count if count <= most_bytes else 0


def _asf_bytes(file: BinaryIO) -> int:
    """The bytes of an ASF file as it states them, in one object of its header; 0 if it states none."""
    file.seek(0)
    head = file.read(ASF_BYTES)
    at = head.find(ASF_FILE)
    # The object has the file's size at its byte 40, and its flags, 4 bytes, at byte 88.
    if at < 0 or len(head) < at + 92 or head[at + 88] & ASF_LIVE:
        return 0
    return int(struct.unpack_from("<Q", head, at + 40)[0])


def _lacks_list(file: BinaryIO, file_bytes: int) -> bool:
    """Whether a file of `file_bytes` consists of boxes with media, and no box lists the media. The check of the file's length may miss
    this: the list, or its beginning, may have fewer bytes than SLACK."""
    if not _has_boxes(file):
        return False
    ends = {_kind_inside(file, kind, begin): end for kind, begin, end in boxes(file)}
    # Behind a box of a kind that is not known here there may be a list.
    are_all_known = max(ends.values(), default=0) + BOX_HEAD > file_bytes
    return are_all_known and b"mdat" in ends and not ends.keys() & LISTS


def _kind_inside(file: BinaryIO, kind: bytes, begin: int) -> bytes:
    """The kind of a box that begins there: FFmpeg takes a free box for the list if it holds one, as an interrupted program leaves it."""
    if kind != b"free":
        return kind
    file.seek(begin + BOX_HEAD + 4)  # The type of the first box inside, after the size of that box.
    return b"moov" if file.read(4) in (b"mvhd", b"cmov") else kind


def _has_boxes(file: BinaryIO) -> bool:
    file.seek(4)
    return file.read(4) in BOX_TYPES


def boxes(file: BinaryIO) -> Iterator[tuple[bytes, int, int]]:
    """Yields type, beginning and end of the boxes that follow each other. By ISO/IEC 14496-12 a box has its size, its type, and its size
    again if 32 bits are too few; 0 means up to the end of the file."""
    at = 0
    for _ in range(BOXES):
        file.seek(at)
        size, kind, large = struct.unpack(">I4sQ", file.read(16).ljust(16, b"\0"))
        size = large if size == 1 else size
        if kind not in BOX_TYPES or size < BOX_HEAD:
            return
        yield kind, at, at + size
        at += size


def matroska_bytes(file: BinaryIO) -> int:
    """The bytes of the whole file as it states them; 0 if it states none. RFC 8794: a header, then one element with all else."""
    file.seek(len(EBML))
    header = _matroska_size(file)
    file.seek(header or 0, io.SEEK_CUR)
    if header is None or file.read(len(SEGMENT)) != SEGMENT:
        return 0
    size = _matroska_size(file)
    return 0 if size is None else file.tell() + size


def _matroska_size(file: BinaryIO) -> int | None:
    """Read a number, which has 1 to 8 bytes: one byte more than its first byte has zeros in front of the first 1. None if all its other
    bits are set, which means unknown, and at the file's end."""
    first = file.read(1)
    length = 9 - first[0].bit_length() if first and first[0] else 0
    if not length:
        return None
    bits = 7 * length
    value = int.from_bytes(first + file.read(length - 1)) & ((1 << bits) - 1)
    return None if value == (1 << bits) - 1 else value


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
    may_restart = bool(container.format.flags & cast(int, Flags.ts_discont.value))
    shift_s = Fraction(0)
    earlier: dict[int, tuple[Fraction, Fraction]] = {}  # By stream: begin and length of its last packet, in seconds.
    for packet in container.demux(*streams):
        if may_restart and packet.dts is not None and packet.time_base:
            unit, index = packet.time_base, packet.stream_index
            begin_s = packet.dts * unit + shift_s
            last_s, length_s = earlier.get(index, (begin_s, Fraction(0)))
            if not -STEP_BACK <= begin_s - last_s - length_s <= LEAP:
                shift_s += last_s + length_s - begin_s
                begin_s = last_s + length_s
            earlier[index] = begin_s, packet.duration * unit if packet.duration else begin_s - last_s
            ticks = round(shift_s / unit)
            packet.dts += ticks
            packet.pts = None if packet.pts is None else packet.pts + ticks
        yield packet


def frames(container: InputContainer, stream: Any, other_stream: Any = None) -> Iterator[Any]:
    """Yields the decoded frames of `stream`, on one clock with `other_stream`. The last packet of a file that was cut off may not decode,
    and is left out then; if an earlier packet does not decode, FFmpeg's error is raised. Decoders of FOUND_BY_A_MARK may lose some packets:
    BadMedia is raised if they lose too many."""
    decoder = _decoder(stream)
    count = undecoded = 0
    last_error = None  # Raised if another packet follows.
    for packet in packets(container, stream, *([other_stream] if other_stream else [])):
        if packet.stream.index != stream.index:  # the last, empty packet has no number of its own
            continue
        if last_error and packet.size:
            raise last_error
        count += bool(packet.size)
        try:
            yield from decoder.decode(packet)
        except av.error.FFmpegError as error:
            if is_memory(error) or is_refusal(error):
                raise
            undecoded += 1
            last_error = None if stream.codec_context.name in FOUND_BY_A_MARK else error
    if undecoded > max(UNDECODED * count, 1):
        raise BadMedia(f"{undecoded} of its {count} frames of sound cannot be decoded: it is damaged, encode it anew")


def _decoder(stream: Any) -> Any:
    """A decoder for a stream that `checked_decoder` has checked. Transparent films in VP8 and VP9 need another decoder: FFmpeg's own do not
    read the transparency that comes with each packet."""
    checked = stream.codec_context
    alpha_decoder = ALPHA_DECODERS.get(checked.name) if stream.metadata.get("alpha_mode") == "1" else None
    if alpha_decoder is None:
        return checked
    decoder: Any = av.CodecContext.create(alpha_decoder, "r")
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
    if missing := sum(end > size for end in ends):
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
