"""The place where an MP3 begins, and the numbers of frames and bytes that its header states. Runs in the decoding process."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import BinaryIO

MAX_TAGS = 100
"""How many tags of ID3 in a row are passed over, at most."""

FEW_TAGS = 2
"""How many tags of ID3 in a row may be in front of an MP3 that follows another sound."""

FIRST_BYTES = 200
"""Bytes of the first frame: the header is in them."""

MIN_FRAME = 24
"""Fewest bytes of a frame."""

HAS_FRAMES, HAS_BYTES = 1, 2

MP3_FRAME = re.compile(rb"\xff[\xe2\xe3\xf2\xf3\xfa\xfb]")
"""Matches the mark of any frame."""

MP3_BEGINNING = re.compile(MP3_FRAME.pattern + rb".{2}(?:.{2})?(?:.{9}|.{17}|.{32})(Xing|Info|VBRI)", re.DOTALL)
"""Matches mark and head of a frame, the checksum that some have, the frame's values about its samples, and the header's name."""

MP3_TAGGED = re.compile(rb"ID3[\x02-\x04]\x00[\x00-\xf0][\x00-\x7f]{4}")
"""Head of a tag of ID3, with its size in steps of seven bits."""


@dataclass(frozen=True, slots=True)
class Mp3Header:
    """The header of an MP3. frames: frames of sound without the first frame, which holds the header. place: place of that number in the
    file. end: end of the file as stated, 0 if not stated."""

    frames: int
    place: int
    end: int

    def may_be_cut(self, file_bytes: int, most_bytes: int) -> bool:
        """Whether a file of `file_bytes`, with fewer frames than stated, may have been cut off. If an end is stated, the end decides.
        Numbers that no file of up to most_bytes can have are not believed."""
        return file_bytes < self.end <= most_bytes if self.end else self.frames * MIN_FRAME <= most_bytes


def mp3_header(file: BinaryIO) -> Mp3Header | None:
    """The header of an MP3; None if the file has none, or the header does not state the number of frames."""
    at = behind_tags(file)
    file.seek(at)
    head = file.read(FIRST_BYTES)
    if len(head) < FIRST_BYTES or (match := MP3_BEGINNING.match(head)) is None:
        return None
    place = match.end()  # After the header's name.
    if match[1] == b"VBRI":  # Three values of 2 bytes, then the bytes of the file and the frames.
        size, frames = struct.unpack_from(">II", head, place + 6)
        return Mp3Header(frames, at + place + 10, at + size if size else 0)
    flags, frames, size = struct.unpack_from(">III", head, place)
    if not flags & HAS_FRAMES:
        return None
    return Mp3Header(frames, at + place + 4, at + size if flags & HAS_BYTES and size else 0)


def mp3_begins(file: BinaryIO, at: int) -> bool:
    """Whether a whole MP3 begins at byte `at`, with its header or a tag in front."""
    file.seek(at)
    begin = file.read(FIRST_BYTES)
    if not MP3_TAGGED.match(begin):
        return bool(MP3_BEGINNING.match(begin))
    file.seek(behind_tags(file, at, max_tags=FEW_TAGS))
    return bool(MP3_FRAME.match(file.read(2)))


def behind_tags(file: BinaryIO, at: int = 0, *, max_tags: int = MAX_TAGS) -> int:
    """The place after the tags of ID3 that begin at byte `at`; `at` if there are none. max_tags: how many are passed over, at most."""
    for _ in range(max_tags):
        file.seek(at)
        head = file.read(10).ljust(10, b"\0")
        if not head.startswith(b"ID3"):
            break
        at += 10 + sum((byte & 0x7F) << shift for byte, shift in zip(head[6:10], (21, 14, 7, 0), strict=True))
    return at
