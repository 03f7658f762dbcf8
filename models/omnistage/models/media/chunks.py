"""The end of the samples in files of chunks: WAV, RF64, W64, AIFF and CAF. Runs in the decoding process.

A program that writes to a pipe cannot go back to correct a length, so its file states any: 0, the largest, or the length of a first block.
FFmpeg and libsndfile believe most of them. Here the bytes in the file decide: samples end at the stated place if the size of the file or
known chunks confirm it, else at the end of the file.
"""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO

from omnistage.models.media.heads import HeadSearch, begins
from omnistage.models.media.wholeness import SLACK, cut_off

MOST = 100
"""How many chunks in a row are looked at, at most."""

FEW = 1.0
"""Unknown bytes after the samples are no samples if both stated sizes end before them, and they are fewer than this times the samples. A
program that states sizes before it knows them states the sizes of a first block, which are far smaller."""

CHUNKS = (b"LIST", b"id3 ", b"ID3 ", b"bext", b"iXML", b"_PMX", b"PEAK", b"cue ", b"smpl", b"inst", b"JUNK", b"NAME", b"ANNO", b"info")
TAGS = (b"ID3", b"TAG", b"APETAGEX", b"LYRICSBEGIN")
"""Names of things that may follow samples: chunks, which may be cut off, and tags, which are no chunks."""

MARKS = re.compile(b"|".join((*CHUNKS, b"RIFF", b"RF64", b"BW64", b"RIFX", b"FORM", b"riff\x2e", b"caff\0")))
"""Matches everything that may follow samples of unknown number."""

MARK_BYTES = 5
"""Bytes of the longest mark."""


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """The layout of a format; places and sizes in bytes. first: place of the first chunk. name_bytes: length of a chunk's name. size:
    `struct` format of a chunk's size. own: bytes of the chunk's head that this size includes. align: chunks begin at multiples of it.
    whole: place where the size of the file stands, 0 if nowhere. samples: name of the chunk with the samples."""

    first: int
    name_bytes: int
    size: str
    own: int
    align: int
    whole: int
    samples: bytes = b"data"

    @property
    def head_bytes(self) -> int:
        return self.name_bytes + struct.calcsize(self.size)


WAV, RIFX = ChunkLayout(12, 4, "<I", 0, 2, 4), ChunkLayout(12, 4, ">I", 0, 2, 4)
AIFF = ChunkLayout(12, 4, ">I", 0, 2, 4, b"SSND")
W64 = ChunkLayout(40, 16, "<Q", 24, 8, 16)
CAF = ChunkLayout(8, 4, ">q", 0, 1, 0)
WIDE = (b"RF64", b"BW64")
"""Formats that have their sizes of 64 bits in a chunk of their own."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of a file. name: its first four bytes. start: place of its content. size: bytes of the content, as the chunk states."""

    name: bytes
    start: int
    size: int

    @property
    def end(self) -> int:
        return self.start + self.size


@dataclass(frozen=True, slots=True)
class SoundExtent:
    """The end of a sound in its file. stop: place after its last byte. then: place of the next sound, or the end of the file. other: by
    place, bytes that must replace the file's own so that its lengths are right."""

    stop: int
    then: int
    other: Mapping[int, bytes]


def layout(file: BinaryIO, at: int) -> ChunkLayout | None:
    """The layout of the file of chunks that begins at byte `at`; None if no such file begins there."""
    file.seek(at)
    head = file.read(16)
    if head[8:12] == b"WAVE" and head[:4] in (b"RIFF", *WIDE):
        return WAV
    if head[8:12] == b"WAVE" and head[:4] == b"RIFX":
        return RIFX
    if head[8:12] in (b"AIFF", b"AIFC") and head[:4] == b"FORM":
        return AIFF
    if head.startswith(b"caff\0\1"):
        return CAF
    return W64 if head.startswith(b"riff\x2e\x91\xcf\x11") else None


def extent(file: BinaryIO, form: ChunkLayout, most_bytes: int, search: HeadSearch) -> SoundExtent:
    """The extent of the first sound in a file that begins with a sound of this layout. Its stated number of samples counts if the rest of
    the file confirms it. most_bytes: largest size of a file; more is not believed. Raises BadMedia for a sound that was cut off."""
    end = file.seek(0, io.SEEK_END)
    samples = next((chunk for chunk in _chunks(file, form.first, end, form) if chunk.name == form.samples), None)
    if samples is None:
        return SoundExtent(end, end, {})
    file_end, stated, other = _stated_sizes(file, form, samples)
    available = end - samples.start
    stop = samples.start + stated
    agree = form is CAF or 0 <= file_end - stop < form.align
    is_tail_short = available - stated < FEW * stated and agree
    if 0 <= stated <= available and (following := _find_next(file, stop, end, form, is_tail_short=is_tail_short)):
        size, next_place = stated, following
        if is_tail_short and available - stated > SLACK and (another := search.next_head(file, samples.start, stop)) is not None:
            raise cut_off(stop, another)
    elif stated <= most_bytes and stop > end + SLACK and abs(file_end - end) > form.first:
        # If the stated size of the whole file is right, nothing was cut off, whatever the chunk of the samples states.
        raise cut_off(stop, end)
    else:
        size, next_place = _search_end(file, samples.start, end, form, search)
        if agree and next_place < stop <= end:
            raise cut_off(stop, next_place)
    other[samples.start - struct.calcsize(form.size)] = struct.pack(form.size, size + form.own)
    if form.whole:
        other[form.whole] = struct.pack(form.size, next_place if form is W64 else next_place - 8)
    # If the stated size is 0, FFmpeg reads samples up to the end, so the extent must stop where they would begin.
    return SoundExtent(next_place if size else samples.start, next_place, other)


def _stated_sizes(file: BinaryIO, form: ChunkLayout, samples: Chunk) -> tuple[int, int, dict[int, bytes]]:
    """The end of the file and the number of bytes of its samples, as the file states them. The dict has, by place, the bytes that must
    replace the bytes of a file with 64-bit sizes, so that it can be read with 32-bit sizes."""
    file.seek(0)
    head = file.read(40).ljust(40, b"\0")
    if head.startswith(WIDE) and head[12:16] == b"ds64":
        stated_size, wide = struct.unpack_from("<QQ", head, 20)
        return 8 + stated_size, wide if samples.size == 0xFFFFFFFF else samples.size, {0: b"RIFF", 12: b"JUNK"}
    stated_size = struct.unpack_from(form.size, head, form.whole)[0] if form.whole else 0
    return stated_size if form is W64 else stated_size + 8, samples.size, {}


def _find_next(file: BinaryIO, stop: int, end: int, form: ChunkLayout, *, is_tail_short: bool) -> int:
    """The place of the next sound after samples that end at `stop`; `end`, the end of the file, if none follows; 0 if more samples seem to
    follow. is_tail_short: whether the bytes after `stop` are too few for samples."""
    for at in dict.fromkeys((_align(stop, form), stop)):
        if begins(file, at):
            return at
        chunks_end = _after_chunks(file, at, end, form)
        if chunks_end >= end:
            return end
        if layout(file, chunks_end) is not None or begins(file, chunks_end):
            return chunks_end
        file.seek(at)
        if file.read(16).startswith((*CHUNKS, *TAGS)):
            return end
    return end if is_tail_short else 0


def _search_end(file: BinaryIO, start: int, end: int, form: ChunkLayout, search: HeadSearch) -> tuple[int, int]:
    """Search for the end of samples that begin at `start`: they end at another file, or at chunks that reach to another file or to the end.
    Returns the number of bytes of the samples, and the place of the next sound or the end of the file."""
    passed_end = start
    for at in search.candidates(file, start, MARKS, MARK_BYTES):
        if at < passed_end:  # Inside chunks that were passed before.
            continue
        passed_end = chunks_end = _after_chunks(file, at, end, form)
        if (chunks_end > at and end <= chunks_end <= end + 1) or layout(file, chunks_end) is not None:
            return at - start, min(chunks_end, end)
    return end - start, end


def _after_chunks(file: BinaryIO, at: int, end: int, form: ChunkLayout) -> int:
    """The place after the chunks that follow each other from `at` on; `at` if no chunk is there."""
    for chunk in _chunks(file, at, end, form):
        at = _align(chunk.end, form) if layout(file, chunk.end) is None else chunk.end
    return at


def _chunks(file: BinaryIO, at: int, end: int, form: ChunkLayout) -> Iterator[Chunk]:
    """Yields the chunks that follow each other from `at` on, while they are whole. A chunk of samples is the last, and may be cut off."""
    for _ in range(MOST):
        file.seek(at)
        head = file.read(form.head_bytes)
        if len(head) < form.head_bytes or not _is_name(head[:4]) or layout(file, at) is not None:
            return
        chunk = Chunk(head[:4], at + form.head_bytes, struct.unpack_from(form.size, head, form.name_bytes)[0] - form.own)
        if chunk.name != form.samples and not 0 <= chunk.size <= end - chunk.start:
            return
        yield chunk
        if chunk.name == form.samples:
            return
        file.seek(_align(chunk.end, form))
        # Some programs leave out the byte that makes an odd size even.
        at = _align(chunk.end, form) if _is_name(file.read(4)) else chunk.end


def _align(at: int, form: ChunkLayout) -> int:
    return -(-at // form.align) * form.align


def _is_name(name: bytes) -> bool:
    return len(name) == 4 and all(0x20 <= byte < 0x7F for byte in name)
