"""The notes that are read from a PNG, apart from its pixels. Texts and profiles are packed: a small file may have gigabytes of them. Notes
that change the look of the picture are read, each once, and all others are passed over.

`read_few_notes` replaces the functions of Pillow that read notes. Runs in the decoding process.
"""

from __future__ import annotations

import zlib
from typing import IO

from PIL import ImageFile, PngImagePlugin

NOTE_BYTES = 4 << 20
"""The limit of bytes of a note, unpacked. A longer note is passed over, too."""

PICTURE = frozenset((b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND", b"acTL", b"fcTL", b"fdAT"))
"""Chunks without which there is no picture, or a different one: faults in them are reported."""

WHOLE_NOTES = (b"iCCP", b"eXIf")
TEXTS = (b"tEXt", b"zTXt", b"iTXt")
TURNING_TEXTS = (b"XML:com.adobe.xmp", b"Raw profile type exif")
"""Keywords of texts in which programs note how a camera was held."""

KEYWORD_BYTES = 79
"""The limit of bytes of a keyword by the standard (ISO/IEC 15948, 11.3.4)."""


class Chunks(PngImagePlugin.PngStream):
    """The chunks of a PNG, one after the other. cid: type of a chunk. pos, length: place and number of the bytes of its data."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self._notes: set[bytes] = set()
        """The notes that have been read."""

    def call(self, cid: bytes, pos: int, length: int) -> bytes:
        """Read one chunk as Pillow does; empty for a broken note. Pillow passes over a chunk for which AttributeError is raised."""
        if cid in PICTURE:
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
        if cid in PICTURE:
            super().crc(cid, data)
        else:
            self.crc_skip(cid, data)

    def _note_name(self, cid: bytes, pos: int, length: int) -> bytes:
        """The name of a note that changes how the picture looks: the keyword of a text, else the type of the chunk. Empty for all other
        chunks. Afterwards the file stands at `pos`."""
        if cid not in TEXTS:
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
    """Make Pillow read PNGs by `Chunks`, in this process."""
    PngImagePlugin.MAX_TEXT_CHUNK = NOTE_BYTES
    PngImagePlugin.PngStream = Chunks  # type: ignore[misc, assignment]
