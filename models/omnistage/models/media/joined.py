"""The sounds of which a file consists, each as a file of its own whose lengths are right. Runs in the decoding process.

Sounds that are made piece by piece are sent as files one behind the other. FFmpeg goes on by itself where frames follow frames, as in ADTS,
and in MP3 with the silence that encoders put around each. Of WAV, M4A and the like it would play the first alone, and Ogg and FLAC wrongly
where the rate changes.
"""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import BinaryIO

from omnistage.models.media import chunks, mp3
from omnistage.models.media.errors import BadMedia
from omnistage.models.media.wholeness import ASF_HEAD, boxes, cut_off

PAGE = struct.Struct("<4sBBqIIIB")
"""Of Ogg (RFC 3533): mark, version, flags, place in the sound, stream, number, checksum, how many lengths follow."""

BEGINS, ENDS = 2, 4
"""Flags: the first page of a stream, the last one."""

HEADS = (
    re.compile(rb"fLaC[\x00\x80]\x00\x00\x22"),  # RFC 9639: and the head of its first block, whose size never differs.
    re.compile(rb"\.snd\x00\x00.{6}\x00\x00\x00[\x01-\x1f]", re.DOTALL),  # AU: its numbers are of 32 bits and small, but for one.
    re.compile(rb"#!AMR(?:-WB)?\n"),
    re.compile(re.escape(ASF_HEAD)),
    re.compile(rb"Creative Voice File\x1a"),
    re.compile(rb"FLV\x01[\x01\x04\x05]\x00\x00\x00\x09\x00\x00\x00\x00"),
)
"""Beginnings that are so long that no sound looks like one."""

HEAD_BYTES = 20
"""Of the longest of them."""

MP3_HEAD = re.compile(b"|".join((mp3.BEGINNING.pattern, mp3.TAGGED.pattern)), re.DOTALL)
"""An MP3 need not have such a head to be the first of several."""

MP3_HEAD_BYTES = 42

MOST = 1000
"""Sounds that one file may have, one behind the other."""

BLOCK = 1 << 20
"""Bytes that are searched at once."""


class Stretch(io.RawIOBase):
    """A stretch of a file. other: bytes to be read in some places instead of those that are there."""

    def __init__(self, file: BinaryIO, begin: int, end: int, other: Mapping[int, bytes] = MappingProxyType({})) -> None:
        self._file, self._begin, self._size, self._other = file, begin, end - begin, other
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = max(0, offset + (0, self._place, self._size)[whence])
        return self._place

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        self._file.seek(self._begin + self._place)
        data = bytearray(self._file.read(max(0, min(len(buffer), self._size - self._place))))
        for at, new in self._other.items():
            for place in range(max(at, self._place), min(at + len(new), self._place + len(data))):
                data[place - self._place] = new[place - at]
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)


def joined_sounds(file: BinaryIO, most_bytes: int) -> Iterator[BinaryIO]:
    """most_bytes: that a file may have at all. Raises BadMedia for one that was cut off."""
    end = file.seek(0, io.SEEK_END)
    begin = count = 0
    while begin < end:
        count += 1
        if count > MOST:
            raise BadMedia(f"it is more than {MOST} sounds one behind the other: make one of them")
        rest = io.BufferedReader(Stretch(file, begin, end))
        extent = _extent(rest, most_bytes)
        yield io.BufferedReader(Stretch(file, begin, begin + extent.stop, extent.other))
        begin += extent.then


def _extent(file: BinaryIO, most_bytes: int) -> chunks.Extent:
    """Of the first sound."""
    if (layout := chunks.layout(file, 0)) is not None:
        return chunks.extent(file, layout, most_bytes)
    end = file.seek(0, io.SEEK_END)
    file.seek(0)
    head = file.read(12).ljust(12, b"\0")
    if head.startswith(b"OggS"):
        then = _next_ogg(file, end)
    elif head[4:8] == b"ftyp":
        then = next((at for kind, at, _ in boxes(file) if at and kind == b"ftyp"), end)
    else:
        then = _next_head(file, end)
    return chunks.Extent(then, then, _mended_au(head, then))


def _mended_au(head: bytes, end: int) -> Mapping[int, bytes]:
    """Of an AU whose samples are not as many as it says, the word for an unknown length: FFmpeg takes no other for that."""
    mark, before, count = struct.unpack(">4sII", head)
    return {8: b"\xff" * 4} if mark == b".snd" and not 0 < count <= end - before else {}


def _next_ogg(file: BinaryIO, end: int) -> int:
    """Where the second one begins, or the file ends. Raises BadMedia if it ends in the middle of a page."""
    at, begun, ended = 0, False, False
    while at < end:
        file.seek(at)
        head = file.read(PAGE.size).ljust(PAGE.size, b"\0")
        mark, _, flags, *_, lengths = PAGE.unpack(head)
        if mark != b"OggS":
            file.seek(at)
            found = file.read(BLOCK).find(b"OggS")
            at += found if found >= 0 else BLOCK - len(b"OggS")
            continue
        if flags & BEGINS and begun:
            return at
        begun |= not flags & BEGINS
        after = at + PAGE.size + lengths + sum(file.read(lengths))
        if after > end and not ended:
            raise cut_off(after, end)
        ended |= bool(flags & ENDS)
        at = after
    return end


def _next_head(file: BinaryIO, end: int) -> int:
    """Where a second one begins as the first does, or the file ends."""
    first = mp3.behind_tags(file)
    file.seek(first)
    begin = file.read(HEAD_BYTES)
    if mp3.FRAME.match(begin):
        return next((at for at in _found(file, first + 1, MP3_HEAD, MP3_HEAD_BYTES) if mp3.begins(file, at)), end)
    head = next((head for head in HEADS if head.match(begin)), None)
    return end if head is None else next(_found(file, first + 1, head, HEAD_BYTES), end)


def _found(file: BinaryIO, begin: int, head: re.Pattern[bytes], most_bytes: int) -> Iterator[int]:
    """Where something begins so, which has so many bytes at most."""
    while True:
        file.seek(begin)
        data = file.read(BLOCK + most_bytes - 1)
        yield from (begin + found.start() for found in head.finditer(data) if found.start() < BLOCK)
        if len(data) < BLOCK:
            return
        begin += BLOCK
