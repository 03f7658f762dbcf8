"""The sounds of which a file consists, each as a file of its own whose lengths are right. Runs in the decoding process.

Sounds that are made piece by piece are sent as files one after the other. FFmpeg goes on by itself where frames follow frames, as in ADTS,
and in MP3 with the silence that encoders put around each. It would play only the first of several WAV, M4A and similar files, and would
play Ogg and FLAC wrongly if the rate changes.
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
from omnistage.models.media.heads import HEAD, HEAD_BYTES, HeadSearch, begins, find_heads
from omnistage.models.media.wholeness import EBML, boxes, cut_off, matroska_bytes

PAGE = struct.Struct("<4sBBqIIIB")
"""The head of a page of Ogg (RFC 3533): mark, version, flags, place in the sound, stream, number, checksum, how many lengths follow."""

OGG = re.compile(rb"OggS")
BEGINS, ENDS = 2, 4
"""Flags: the first page of a stream, the last one."""

MOST = 1000
"""The limit of sounds in one file, one after the other."""


class Stretch(io.RawIOBase):
    """The bytes of a file from `begin` to before `end`, as a file. other: bytes that replace the file's own, by place in it."""

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
    """Yields the sounds of a file one after the other, each as a file whose lengths are right. most_bytes: largest size that a file can
    have. If a head states a larger length, the length is not believed. Raises BadMedia for a sound that was cut off."""
    end = file.seek(0, io.SEEK_END)
    search = HeadSearch()
    begin = count = 0
    while begin < end:
        count += 1
        if count > MOST:
            raise BadMedia(f"it is more than {MOST} sounds one behind the other: make one of them")
        begin += _tag_bytes(io.BufferedReader(Stretch(file, begin, end)))
        extent = _extent(io.BufferedReader(Stretch(file, begin, end)), most_bytes, search)
        yield io.BufferedReader(Stretch(file, begin, begin + extent.stop, extent.other))
        begin += extent.then


def _tag_bytes(file: BinaryIO) -> int:
    """The bytes of tags in front of a sound; 0 for an MP3 or without tags. FFmpeg skips tags only in front of few formats."""
    at = mp3.behind_tags(file)
    file.seek(at)
    return at if at and HEAD.match(file.read(HEAD_BYTES)) else 0


def _extent(file: BinaryIO, most_bytes: int, search: HeadSearch) -> chunks.SoundExtent:
    """The extent of the first sound. The next sound is looked for where the format says, else wherever bytes may be a head."""
    if (layout := chunks.layout(file, 0)) is not None:
        return chunks.extent(file, layout, most_bytes, search)
    end = file.seek(0, io.SEEK_END)
    file.seek(0)
    head = file.read(12).ljust(12, b"\0")
    if head.startswith(b"OggS"):
        next_place = _next_ogg(file, end)
    elif head[4:8] == b"ftyp":
        next_place = _next_boxes(file, end)
    elif head.startswith(EBML):
        next_place = _next_matroska(file, end)
    else:
        next_place = search.next_begin(file, mp3.behind_tags(file) + 1) or end
    return chunks.SoundExtent(next_place, next_place, _mend_au(head, next_place))


def _next_boxes(file: BinaryIO, end: int) -> int:
    """The place after the first MP4 where another MP4 or sound begins, or the end of the file."""
    last = 0
    for kind, at, after in boxes(file):
        if at and kind == b"ftyp":
            return at
        last = after
    return last if begins(file, last) else end


def _next_matroska(file: BinaryIO, end: int) -> int:
    """The place after the first Matroska file where another sound begins, or the end of the file."""
    last = matroska_bytes(file)
    return last if 0 < last < end and begins(file, last) else end


def _mend_au(head: bytes, end: int) -> Mapping[int, bytes]:
    """Bytes, by place, that make the length of an AU unknown, as FFmpeg needs it, if it is 0 or goes beyond `end`; else empty."""
    mark, before, count = struct.unpack(">4sII", head)
    return {8: b"\xff" * 4} if mark == b".snd" and not 0 < count <= end - before else {}


def _next_ogg(file: BinaryIO, end: int) -> int:
    """The place after the first Ogg where the next sound begins, or the end. Raises BadMedia if the file ends within a page."""
    at, has_data, has_end = 0, False, False
    while at < end:
        file.seek(at)
        head = file.read(PAGE.size).ljust(PAGE.size, b"\0")
        mark, _, flags, *_, lengths = PAGE.unpack(head)
        if mark != b"OggS":
            if begins(file, at):
                return at
            at = next(find_heads(file, at, OGG, len(b"OggS")), end)
            continue
        if flags & BEGINS and has_data:
            return at
        has_data |= not flags & BEGINS
        after = at + PAGE.size + lengths + sum(file.read(lengths))
        if after > end and not has_end:
            raise cut_off(after, end)
        has_end |= bool(flags & ENDS)
        at = after
    return end
