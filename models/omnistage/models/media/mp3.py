"""How many frames an MP3 says it has, in the header that encoders put into its first frame. Runs in the decoding process."""

from __future__ import annotations

import io
import struct
from typing import BinaryIO

TAGS = 100
"""Of ID3 that are passed over, one behind the other."""

FIRST_BYTES = 200
"""Of the first frame: the header is in them."""

LEAST_FRAME = 24
"""Bytes."""

HAS_FRAMES, HAS_BYTES = 1, 2


def missing_frames(file: BinaryIO) -> int:
    """So many frames must be there, if bytes are missing too; 0 if none are, or if the file does not say it. Its first frame is not
    counted."""
    end = file.seek(0, io.SEEK_END)
    at = behind_tags(file)
    file.seek(at)
    head = file.read(FIRST_BYTES)
    if len(head) < FIRST_BYTES or head[0] != 0xFF or head[1] & 0xE0 != 0xE0:
        return 0
    frames = size = 0
    if (place := max(head.find(b"Xing", 4, 48), head.find(b"Info", 4, 48))) >= 0:
        flags, first, second = struct.unpack_from(">III", head, place + 4)
        frames = first if flags & HAS_FRAMES else 0
        size = (second if flags & HAS_FRAMES else first) if flags & HAS_BYTES else 0
    elif head[36:40] == b"VBRI":
        size, frames = struct.unpack_from(">II", head, 46)
    return frames if frames <= end // LEAST_FRAME * 2 and (not size or at + size > end) else 0


def behind_tags(file: BinaryIO) -> int:
    """Where a file begins that has tags of ID3 in front."""
    at = 0
    for _ in range(TAGS):
        file.seek(at)
        head = file.read(10).ljust(10, b"\0")
        if not head.startswith(b"ID3"):
            break
        at += 10 + sum((byte & 0x7F) << shift for byte, shift in zip(head[6:10], (21, 14, 7, 0), strict=True))
    return at
