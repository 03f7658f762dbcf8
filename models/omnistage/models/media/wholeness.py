"""Whether all of a file came, by what its own header says of its length. Runs in the decoding process.

Decoders take a part for the whole: half of a WAV is a sound of half the length. Of formats that have no length in bytes, such as MPEG-TS,
Ogg and MP3, nothing can be said here.
"""

from __future__ import annotations

import io
import struct
from typing import BinaryIO

from omnistage.models.media.errors import BadMedia

COMPLETE = 0.9
"""Of the bytes that a file says it has, so many must be there: lengths in headers are a little wrong at times."""

UNKNOWN_BYTES = 0x7FFF0000
"""Who writes into a pipe cannot know the length, and writes this or more, or nothing."""

BOXES = 10_000
"""Of an MP4 that are looked at: each fragment of a film has some."""

BOX_TYPES = frozenset(
    (b"ftyp", b"styp", b"moov", b"moof", b"mdat", b"mfra", b"meta", b"sidx", b"free", b"skip", b"wide", b"uuid", b"pnot", b"udta")
)
EBML, SEGMENT = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"
W64_HEAD = b"riff\x2e\x91\xcf\x11"


def check_whole(file: BinaryIO) -> None:
    """Raises BadMedia for a file that was cut off."""
    there = file.seek(0, io.SEEK_END)
    said = _said(file)
    if there < COMPLETE * said:
        raise BadMedia(f"it says that it has {said} bytes, and {there} are there: it was cut off, send all of it")


def _said(file: BinaryIO) -> int:
    """Bytes of the whole, 0 where the file does not tell."""
    file.seek(0)
    head = file.read(64).ljust(64, b"\0")
    if head.startswith(W64_HEAD):
        return int(struct.unpack_from("<Q", head, 16)[0])
    if head.startswith(b"RF64"):
        return 8 + int(struct.unpack_from("<Q", head, 20)[0]) if head[12:16] == b"ds64" else 0
    if head.startswith(b"RIFF"):
        return _known(8, struct.unpack_from("<I", head, 4)[0])
    if head.startswith(b"FORM"):
        return _known(8, struct.unpack_from(">I", head, 4)[0])
    if head.startswith(b".snd"):
        return _known(*struct.unpack_from(">II", head, 4))
    if head.startswith(EBML):
        return _of_matroska(file)
    return _of_boxes(file) if head[4:8] in BOX_TYPES else 0


def _known(before: int, count: int) -> int:
    return before + count if 0 < count < UNKNOWN_BYTES else 0


def _of_boxes(file: BinaryIO) -> int:
    """ISO/IEC 14496-12: a box has its size, its type, and its size again where 32 bits are too few; 0 is to the end of the file."""
    end = 0
    for _ in range(BOXES):
        file.seek(end)
        size, kind, large = struct.unpack(">I4sQ", file.read(16).ljust(16, b"\0"))
        size = large if size == 1 else size
        if kind not in BOX_TYPES or size < 8:
            break
        end += size
    return end


def _of_matroska(file: BinaryIO) -> int:
    """RFC 8794: an element has its name, its size and its content. The first is a header, the second is all else."""
    file.seek(len(EBML))
    header = _size(file)
    file.seek(header or 0, io.SEEK_CUR)
    if header is None or file.read(len(SEGMENT)) != SEGMENT:
        return 0
    size = _size(file)
    return 0 if size is None else file.tell() + size


def _size(file: BinaryIO) -> int | None:
    """A number of 1 to 8 bytes, as many as it has leading zeros and one; None where all of its bits are set, which is an unknown size."""
    first = file.read(1)
    length = 9 - first[0].bit_length() if first and first[0] else 0
    if not length:
        return None
    bits = 7 * length
    value = int.from_bytes(first + file.read(length - 1)) & ((1 << bits) - 1)
    return None if value == (1 << bits) - 1 else value
