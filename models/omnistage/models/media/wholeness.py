"""Checks whether all of a file has come, by the length that its own header states. Runs in the decoding process.

Decoders do not notice a missing end: half of a film is a shorter film. Formats without a length, such as MPEG-TS and ADTS, cannot be
checked. This module compares bytes. Other signs are checked where they are read: sizes of chunks, as in WAV, in `chunks`; the last page of
an Ogg in `joined`; frames of an MP3 and samples of a FLAC in `sounds`; the list of an MP4 or AVI in `containers`.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from typing import BinaryIO

from omnistage.models.media.errors import BadMedia

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
    return _box_bytes(file) if _has_boxes(file) else 0


def _stated_length(before: int, count: int, most_bytes: int) -> int:
    """The length that a file states, before + count bytes; 0 for unknown. A program that writes into a pipe cannot know the length: it
    writes no length, or a length that no file may have."""
    return before + count if count <= most_bytes else 0


def _asf_bytes(file: BinaryIO) -> int:
    """The bytes of an ASF file as it states them, in one object of its header; 0 if it states none."""
    file.seek(0)
    head = file.read(ASF_BYTES)
    at = head.find(ASF_FILE)
    if at < 0 or len(head) < at + 92 or head[at + 88] & ASF_LIVE:
        return 0
    return int(struct.unpack_from("<Q", head, at + 40)[0])


def _box_bytes(file: BinaryIO) -> int:
    return max((end for _, _, end in boxes(file)), default=0)


def _lacks_list(file: BinaryIO, file_bytes: int) -> bool:
    """Whether a file of `file_bytes` consists of boxes with media in them, and none of them lists the media: fewer bytes than SLACK can be
    all of that list, or its beginning."""
    if not _has_boxes(file):
        return False
    ends = {_kind_inside(file, kind, begin): end for kind, begin, end in boxes(file)}
    # Behind a box of a kind that is not known here there may be a list.
    is_all = max(ends.values(), default=0) + BOX_HEAD > file_bytes
    return is_all and b"mdat" in ends and not ends.keys() & LISTS


def _kind_inside(file: BinaryIO, kind: bytes, begin: int) -> bytes:
    """The kind of a box that begins there: FFmpeg takes a free box for the list if it holds one, as an interrupted program leaves it."""
    if kind != b"free":
        return kind
    file.seek(begin + BOX_HEAD + 4)
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
        if kind not in BOX_TYPES or size < 8:
            return
        yield kind, at, at + size
        at += size


def matroska_bytes(file: BinaryIO) -> int:
    """The bytes of the whole file as it states them; 0 if it states none. RFC 8794: a header, then one element with all else."""
    file.seek(len(EBML))
    header = _size(file)
    file.seek(header or 0, io.SEEK_CUR)
    if header is None or file.read(len(SEGMENT)) != SEGMENT:
        return 0
    size = _size(file)
    return 0 if size is None else file.tell() + size


def _size(file: BinaryIO) -> int | None:
    """Read a number of 1 to 8 bytes, one more than leading zero bits. None if all its bits are set (unknown), or at the file's end."""
    first = file.read(1)
    length = 9 - first[0].bit_length() if first and first[0] else 0
    if not length:
        return None
    bits = 7 * length
    value = int.from_bytes(first + file.read(length - 1)) & ((1 << bits) - 1)
    return None if value == (1 << bits) - 1 else value
