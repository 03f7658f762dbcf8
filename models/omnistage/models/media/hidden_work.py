"""The hidden work in a picture's file, which a header with width and height does not show: a great number of parts, and packed notes. Runs
in the decoding process.

`check_hidden_work` counts the parts before the picture is decoded. Each walk is linear in the bytes of the file and ends at its bound,
which is far above what programs write. `read_few_notes` replaces the functions of Pillow that read the notes of a PNG. Texts and
profiles are packed: a small file may have gigabytes of them. Notes that change the look of the picture are read, each once, and all
others are passed over."""

from __future__ import annotations

import io
import re
import struct
import zlib
from typing import IO, BinaryIO

from PIL import ImageFile, PngImagePlugin
from PIL.JpegImagePlugin import MARKER

from omnistage.models.media.terms import BadMedia
from omnistage.models.reports import bytes_told

JPEG_SCANS = 100
"""The limit of scans of a JPEG. Each scan goes over all pixels; encoders write about ten."""

JPEG_SEGMENTS = 1000
JPEG_EXIF_SEGMENTS = 100
"""The limit of segments of EXIF. Pillow joins them one by one, and copies all earlier ones each time. The standard has one."""

JPEG_FILL_BYTES = 1 << 16
"""The limit of bytes between segments, where nothing should be."""

PNG_CHUNKS = 100_000
GIF_BLOCKS = 20_000
"""The limit of blocks before the first picture."""

TIFF_PIECES = 1 << 16
"""The limit of strips or tiles."""

BMP_RUN_BYTES = 8 << 20
"""The limit of bytes of a compressed BMP, which is unpacked run by run."""

MAX_JPEG_BYTES = 64 << 20
"""How many bytes of a JPEG are read. A larger JPEG may be sent as a film: then its header is read, for the error to name its format."""

_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
"""Matches a marker, but no byte of the samples and no mark between them."""

_EOI, _SOS, _EXIF = 0xD9, 0xDA, 0xE1
_STRIPS, _TILES = 273, 324
_RLE = (1, 2)


def check_hidden_work(file: BinaryIO) -> None:
    """Raises BadMedia for a picture whose file has more parts than any honest one."""
    file.seek(0)
    head = file.read(34).ljust(34, b"\0")
    if head.startswith(b"\xff\xd8"):
        _check_jpeg(file)
    elif head.startswith(b"\x89PNG"):
        _check_png(file)
    elif head.startswith((b"GIF87a", b"GIF89a")):
        _check_gif(file)
    elif head.startswith((b"II", b"MM")):
        _check_tiff(file)
    elif head.startswith(b"BM") and struct.unpack_from("<I", head, 30)[0] in _RLE:
        size = file.seek(0, io.SEEK_END)
        if size > BMP_RUN_BYTES:
            raise BadMedia(f"it has {bytes_told(size)} of runs, and at most {bytes_told(BMP_RUN_BYTES)} may be: convert it to PNG")


def _check(count: int, max_count: int, parts: str) -> None:
    if count > max_count:
        raise BadMedia(f"its file has more than {max_count} {parts}, which no program writes: encode it anew")


def _check_jpeg(file: BinaryIO) -> None:
    """Raises BadMedia for a JPEG of too many parts. By ISO/IEC 10918-1, annex B, a part begins with a marker. After most markers stand a
    length and so many bytes. Samples come after the start of a scan. This function finds every part that Pillow finds: like Pillow, it
    reads on after an end mark before any scan, and reads no length after some markers."""
    file.seek(0)
    data = file.read(MAX_JPEG_BYTES)
    at = scans = segments = exif = fill = 0
    while (match := _MARKER.search(data, at)) is not None:
        if not scans:
            fill += match.start() - at
            _check(fill, JPEG_FILL_BYTES, "bytes between its segments")
        marker, at = data[match.start() + 1], match.end()
        if marker == _EOI and scans:
            return
        length = int.from_bytes(data[at : at + 2]) if _has_length(marker) else 0
        segments += 1
        scans += marker == _SOS
        exif += marker == _EXIF and data[at + 2 : at + 6] == b"Exif"
        at += length
        _check(scans, JPEG_SCANS, "scans")
        _check(exif, JPEG_EXIF_SEGMENTS, "segments of Exif")
        _check(segments, JPEG_SEGMENTS, "segments")


def _has_length(marker: int) -> bool:
    """Whether Pillow reads a length after this marker."""
    _, _, handler = MARKER.get(0xFF00 | marker, ("", "", None))
    return handler is not None


def _check_png(file: BinaryIO) -> None:
    """Raises BadMedia for a PNG of too many chunks. A chunk has its length, its name, its data and four bytes more."""
    at = 8
    for _ in range(PNG_CHUNKS):
        file.seek(at)
        head = file.read(8)
        if len(head) < 8 or head.endswith(b"IEND"):
            return
        at += 12 + int.from_bytes(head[:4])
    _check(PNG_CHUNKS + 1, PNG_CHUNKS, "chunks")


def _check_gif(file: BinaryIO) -> None:
    """Raises BadMedia for a GIF of too many blocks. An extension has its kind, then blocks with their lengths, then an empty one."""
    file.seek(10)
    flags = int.from_bytes(file.read(1))  # 0 at the end of the file.
    # After 13 bytes of head there may be a palette: 3 bytes for each of 2 ** (n + 1) colours.
    at = 13 + (3 * 2 ** ((flags & 7) + 1) if flags & 128 else 0)
    is_in_extension = False
    for _ in range(GIF_BLOCKS):
        file.seek(at)
        head = file.read(2)
        if len(head) < 2 or (not is_in_extension and head[:1] in b",;"):
            return
        if is_in_extension:
            at += 1 + head[0]
            is_in_extension = head[0] > 0
        elif head[:1] == b"!":
            at += 2
            is_in_extension = True
        else:
            at += 1
    _check(GIF_BLOCKS + 1, GIF_BLOCKS, "blocks before its picture")


def _check_tiff(file: BinaryIO) -> None:
    """Raises BadMedia for a TIFF of too many pieces. An entry of its table has number, type, count of values, and values or their place."""
    file.seek(0)
    head = file.read(16).ljust(16, b"\0")
    order = "<" if head[:2] == b"II" else ">"
    large = struct.unpack_from(order + "H", head, 2)[0] == 43  # The version of BigTIFF, whose places and counts have 64 bits.
    place, count, entry = ("Q", "Q", "HHQ8x") if large else ("I", "H", "HHI4x")
    (at,) = struct.unpack_from(order + place, head, 8 if large else 4)
    file.seek(min(at, MAX_JPEG_BYTES))
    count_bytes = struct.calcsize(order + count)
    (entries,) = struct.unpack(order + count, file.read(count_bytes).ljust(count_bytes, b"\0"))
    _check(entries, 1 << 16, "entries")
    entry_bytes = struct.calcsize(order + entry)
    table = file.read(entries * entry_bytes)  # The file may end within an entry.
    for tag, _, values in struct.iter_unpack(order + entry, table[: len(table) // entry_bytes * entry_bytes]):
        if tag in (_STRIPS, _TILES):
            _check(values, TIFF_PIECES, "strips or tiles")


NOTE_BYTES = 4 << 20
"""The limit of bytes of a note, unpacked. A longer note is passed over, too."""

PICTURE_CHUNKS = frozenset((b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND", b"acTL", b"fcTL", b"fdAT"))
"""Chunks without which there is no picture, or a different one: faults in them are reported."""

WHOLE_NOTES = (b"iCCP", b"eXIf")
TEXT_CHUNKS = (b"tEXt", b"zTXt", b"iTXt")
TURNING_TEXTS = (b"XML:com.adobe.xmp", b"Raw profile type exif")
"""Keywords of texts in which programs note how a camera was held."""

KEYWORD_BYTES = 79
"""The limit of bytes of a keyword by the standard (ISO/IEC 15948, 11.3.4)."""


class PngChunks(PngImagePlugin.PngStream):
    """The chunks of a PNG, one after the other. cid: type of a chunk. pos, length: place and number of the bytes of its data."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self._notes: set[bytes] = set()
        """The notes that have been read."""

    def call(self, cid: bytes, pos: int, length: int) -> bytes:
        """Read one chunk as Pillow does; empty for a broken note. Pillow passes over a chunk for which AttributeError is raised."""
        if cid in PICTURE_CHUNKS:
            return super().call(cid, pos, length)
        note = self._note_name(cid, pos, length)
        if not note or note in self._notes or not self._is_whole(cid, pos, length):
            raise AttributeError(cid)
        self._notes.add(note)
        try:
            return super().call(cid, pos, length)
        except (LookupError, SyntaxError, ValueError):  # Pillow raises these for a note that is broken or too long.
            return b""

    def crc(self, cid: bytes, data: bytes) -> None:
        """Checks the checksum of a chunk of the picture: notes have been checked, and the chunks that are passed over may be wrong."""
        if cid in PICTURE_CHUNKS:
            super().crc(cid, data)
        else:
            self.crc_skip(cid, data)

    def _note_name(self, cid: bytes, pos: int, length: int) -> bytes:
        """The name of a note that changes how the picture looks: the keyword of a text, else the type of the chunk. Empty for all other
        chunks. Afterwards the file stands at `pos`."""
        if cid not in TEXT_CHUNKS:
            return cid if cid in WHOLE_NOTES else b""
        assert self.fp is not None
        keyword = self.fp.read(min(length, KEYWORD_BYTES + 1)).partition(b"\0")[0]
        self.fp.seek(pos)
        return keyword if keyword in TURNING_TEXTS else b""

    def _is_whole(self, cid: bytes, pos: int, length: int) -> bool:
        """Whether a note has the checksum that it states. Raises OSError if the file ends within the note."""
        assert self.fp is not None
        data = ImageFile._safe_read(self.fp, length)
        stored = self.fp.read(4)
        self.fp.seek(pos)
        return zlib.crc32(data, zlib.crc32(cid)) == int.from_bytes(stored)


def read_few_notes() -> None:
    """Make Pillow read PNGs by `PngChunks`, in this process."""
    PngImagePlugin.MAX_TEXT_CHUNK = NOTE_BYTES
    PngImagePlugin.PngStream = PngChunks  # type: ignore[misc, assignment]
