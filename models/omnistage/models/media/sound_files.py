"""The sounds of which a file consists, each as a file of its own whose lengths are right. Runs in the decoding process.

Sounds that are made piece by piece are sent as files one after the other. FFmpeg goes on by itself where frames follow frames, as in
ADTS, and in MP3 with the silence that encoders put around each. It would play only the first of several WAV, M4A and similar files, and
would play Ogg and FLAC wrongly if the rate changes. So `joined_sounds` looks for the end of each: by the chunks of WAV, RF64, W64, AIFF
and CAF, by the pages and boxes of other formats, or by the head of the next sound. Heads are so long that no samples look like one.

A program that writes to a pipe cannot go back to correct a length, so its file states any: 0, the largest, or the length of a first
block. FFmpeg and libsndfile believe most of them. Here the bytes in the file decide: samples end at the stated place if the size of the
file or known chunks confirm it, else at the end of the file."""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import BinaryIO

from omnistage.models.media.containers import ASF_HEAD, EBML, SLACK, boxes, cut_off, matroska_bytes
from omnistage.models.media.mp3 import MP3_BEGINNING, MP3_TAGGED, behind_tags, mp3_begins
from omnistage.models.media.terms import BadMedia

PAGE = struct.Struct("<4sBBqIIIB")
"""The head of a page of Ogg (RFC 3533): mark, version, flags, place in the sound, stream, number, checksum, how many lengths follow."""

OGG = re.compile(rb"OggS")
BEGINS, ENDS = 2, 4
"""Flags: the first page of a stream, the last one."""

MAX_SOUNDS = 1000
"""The limit of sounds in one file, one after the other."""


class Stretch(io.RawIOBase):
    """The bytes of a file from `begin` to before `end`, as a file. patches: bytes that replace the file's own, by place after `begin`."""

    def __init__(self, file: BinaryIO, begin: int, end: int, patches: Mapping[int, bytes] = MappingProxyType({})) -> None:
        self._file, self._begin, self._size, self._patches = file, begin, end - begin, patches
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = max(0, offset + (0, self._place, self._size)[whence])  # By SEEK_SET, SEEK_CUR or SEEK_END, which are 0, 1 and 2.
        return self._place

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        self._file.seek(self._begin + self._place)
        data = bytearray(self._file.read(max(0, min(len(buffer), self._size - self._place))))
        for patch_place, patch in self._patches.items():
            for place in range(max(patch_place, self._place), min(patch_place + len(patch), self._place + len(data))):
                data[place - self._place] = patch[place - patch_place]
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
        if count > MAX_SOUNDS:
            raise BadMedia(f"it is more than {MAX_SOUNDS} sounds one behind the other: make one of them")
        begin += _tag_bytes(io.BufferedReader(Stretch(file, begin, end)))
        extent = _first_extent(io.BufferedReader(Stretch(file, begin, end)), most_bytes, search)
        yield io.BufferedReader(Stretch(file, begin, begin + extent.stop, extent.patches))
        begin += extent.next_place


def _tag_bytes(file: BinaryIO) -> int:
    """The bytes of tags in front of a sound; 0 for an MP3 or without tags. FFmpeg skips tags only in front of few formats."""
    at = behind_tags(file)
    file.seek(at)
    return at if at and HEAD.match(file.read(HEAD_BYTES)) else 0


def _first_extent(file: BinaryIO, most_bytes: int, search: HeadSearch) -> SoundExtent:
    """The extent of the first sound. The next sound is looked for where the format says, else wherever bytes may be a head."""
    if (layout := chunk_layout(file, 0)) is not None:
        return chunk_extent(file, layout, most_bytes, search)
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
        next_place = search.next_begin(file, behind_tags(file) + 1) or end  # Plus 1: the first sound itself begins behind the tags.
    return SoundExtent(next_place, next_place, _mend_au(head, next_place))


def _next_boxes(file: BinaryIO, end: int) -> int:
    """The place after the first MP4 where another MP4 or sound begins, or the end of the file."""
    boxes_end = 0
    for kind, at, after in boxes(file):
        if at and kind == b"ftyp":  # At 0 it is the first MP4's own.
            return at
        boxes_end = after
    return boxes_end if begins(file, boxes_end) else end


def _next_matroska(file: BinaryIO, end: int) -> int:
    """The place after the first Matroska file where another sound begins, or the end of the file."""
    first_bytes = matroska_bytes(file)
    return first_bytes if 0 < first_bytes < end and begins(file, first_bytes) else end


def _mend_au(head: bytes, end: int) -> Mapping[int, bytes]:
    """The patches of an AU whose length is 0 or goes beyond `end`: they make it unknown, as FFmpeg needs it. Empty for all other files."""
    mark, samples_start, samples_bytes = struct.unpack(">4sII", head)
    # The length stands at byte 8. With all bits set it is unknown.
    return {8: b"\xff" * 4} if mark == b".snd" and not 0 < samples_bytes <= end - samples_start else {}


def _next_ogg(file: BinaryIO, end: int) -> int:
    """The place after the first Ogg where the next sound begins, or the end. Raises BadMedia if the file ends within a page."""
    at, has_data, has_end = 0, False, False
    while at < end:
        file.seek(at)
        head = file.read(PAGE.size).ljust(PAGE.size, b"\0")
        mark, _, flags, *_, length_count = PAGE.unpack(head)
        if mark != b"OggS":
            if begins(file, at):
                return at
            at = next(find_heads(file, at, OGG, len(b"OggS")), end)
            continue
        if flags & BEGINS and has_data:  # All streams of one Ogg begin before its first data.
            return at
        has_data |= not flags & BEGINS
        after = at + PAGE.size + length_count + sum(file.read(length_count))  # The head, the lengths, and the data that they measure.
        if after > end and not has_end:
            raise cut_off(after, end)
        has_end |= bool(flags & ENDS)
        at = after
    return end


MAX_CHUNKS = 100
"""How many chunks in a row are looked at, at most."""

FEW_UNKNOWN = 1.0
"""Unknown bytes after the samples are no samples if both stated sizes end before them, and they are fewer than this times the samples. A
program that states sizes before it knows them states the sizes of a first block, which are far smaller."""

CHUNKS = (b"LIST", b"id3 ", b"ID3 ", b"bext", b"iXML", b"_PMX", b"PEAK", b"cue ", b"smpl", b"inst", b"JUNK", b"NAME", b"ANNO", b"info")
TAG_NAMES = (b"ID3", b"TAG", b"APETAGEX", b"LYRICSBEGIN")
"""Names of things that may follow samples: chunks, which may be cut off, and tags, which are no chunks."""

MARKS = re.compile(b"|".join((*CHUNKS, b"RIFF", b"RF64", b"BW64", b"RIFX", b"FORM", b"riff\x2e", b"caff\0")))
"""Matches everything that may follow samples of unknown number."""

MARK_BYTES = 5
"""Bytes of the longest mark."""


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """The layout of a format; places and sizes in bytes. first: place of the first chunk. name_bytes: length of a chunk's name. size:
    `struct` format of a chunk's size. included_bytes: bytes of the chunk's head that this size includes. align: chunks begin at multiples
    of it. file_size_place: place where the size of the file stands, 0 if nowhere. samples: name of the chunk with the samples."""

    first: int
    name_bytes: int
    size: str
    included_bytes: int
    align: int
    file_size_place: int
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
    """The end of a sound in its file. stop: place after its last byte. next_place: place of the next sound, or the end of the file.
    patches: by place, bytes that must replace the file's own so that its lengths are right."""

    stop: int
    next_place: int
    patches: Mapping[int, bytes]


def chunk_layout(file: BinaryIO, at: int) -> ChunkLayout | None:
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


def chunk_extent(file: BinaryIO, form: ChunkLayout, most_bytes: int, search: HeadSearch) -> SoundExtent:
    """The extent of the first sound in a file that begins with a sound of this layout. Its stated number of samples counts if the rest of
    the file confirms it. most_bytes: largest size of a file; more is not believed. Raises BadMedia for a sound that was cut off."""
    end = file.seek(0, io.SEEK_END)
    samples = next((chunk for chunk in _chunks(file, form.first, end, form) if chunk.name == form.samples), None)
    if samples is None:
        return SoundExtent(end, end, {})
    file_end, stated, patches = _stated_sizes(file, form, samples)
    available = end - samples.start
    stated_end = samples.start + stated
    sizes_agree = form is CAF or 0 <= file_end - stated_end < form.align  # A CAF states no size of the file.
    is_tail_short = available - stated < FEW_UNKNOWN * stated and sizes_agree
    confirmed_place = _find_next(file, stated_end, end, form, is_tail_short=is_tail_short) if 0 <= stated <= available else 0
    if confirmed_place:
        size, next_place = stated, confirmed_place
        if is_tail_short and available - stated > SLACK and (inner_head := search.next_head(file, samples.start, stated_end)) is not None:
            raise cut_off(stated_end, inner_head)  # Another sound was joined to the remains of this one.
    elif stated <= most_bytes and stated_end > end + SLACK and abs(file_end - end) > form.first:
        # If the stated size of the whole file is right, nothing was cut off, whatever the chunk of the samples states.
        raise cut_off(stated_end, end)
    else:
        size, next_place = _search_end(file, samples.start, end, form, search)
        if sizes_agree and next_place < stated_end <= end:
            raise cut_off(stated_end, next_place)
    # The size of a chunk stands right before its content.
    patches[samples.start - struct.calcsize(form.size)] = struct.pack(form.size, size + form.included_bytes)
    if form.file_size_place:
        # All but W64 leave the first 8 bytes of the file out of its size.
        patches[form.file_size_place] = struct.pack(form.size, next_place if form is W64 else next_place - 8)
    # If the stated size is 0, FFmpeg reads samples up to the end, so the extent must stop where they would begin.
    return SoundExtent(next_place if size else samples.start, next_place, patches)


def _stated_sizes(file: BinaryIO, form: ChunkLayout, samples: Chunk) -> tuple[int, int, dict[int, bytes]]:
    """The end of the file and the number of bytes of its samples, as the file states them. The dict has, by place, the bytes that must
    replace the bytes of a file with 64-bit sizes, so that it can be read with 32-bit sizes."""
    file.seek(0)
    head = file.read(40).ljust(40, b"\0")
    if head.startswith(WIDE) and head[12:16] == b"ds64":
        stated_size, wide_samples = struct.unpack_from("<QQ", head, 20)
        samples_bytes = wide_samples if samples.size == 0xFFFFFFFF else samples.size  # All bits set: 32 bits are too few.
        return 8 + stated_size, samples_bytes, {0: b"RIFF", 12: b"JUNK"}
    stated_size = struct.unpack_from(form.size, head, form.file_size_place)[0] if form.file_size_place else 0
    # All but W64 leave the first 8 bytes of the file out of its size.
    return stated_size if form is W64 else stated_size + 8, samples.size, {}


def _find_next(file: BinaryIO, stop: int, end: int, form: ChunkLayout, *, is_tail_short: bool) -> int:
    """The place of the next sound after samples that end at `stop`; `end`, the end of the file, if none follows; 0 if more samples seem to
    follow. is_tail_short: whether the bytes after `stop` are too few for samples."""
    # Some programs leave out the byte that makes an odd size even.
    for at in dict.fromkeys((_align(stop, form), stop)):
        if begins(file, at):
            return at
        chunks_end = _after_chunks(file, at, end, form)
        if chunks_end >= end:
            return end
        if chunk_layout(file, chunks_end) is not None or begins(file, chunks_end):
            return chunks_end
        file.seek(at)
        if file.read(16).startswith((*CHUNKS, *TAG_NAMES)):
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
        # Plus 1: the byte that makes an odd size even may be missing at the end of the file.
        if (chunks_end > at and end <= chunks_end <= end + 1) or chunk_layout(file, chunks_end) is not None:
            return at - start, min(chunks_end, end)
    return end - start, end


def _after_chunks(file: BinaryIO, at: int, end: int, form: ChunkLayout) -> int:
    """The place after the chunks that follow each other from `at` on; `at` if no chunk is there."""
    for chunk in _chunks(file, at, end, form):
        at = _align(chunk.end, form) if chunk_layout(file, chunk.end) is None else chunk.end
    return at


def _chunks(file: BinaryIO, at: int, end: int, form: ChunkLayout) -> Iterator[Chunk]:
    """Yields the chunks that follow each other from `at` on, while they are whole. A chunk of samples is the last, and may be cut off."""
    for _ in range(MAX_CHUNKS):
        file.seek(at)
        head = file.read(form.head_bytes)
        if len(head) < form.head_bytes or not _is_name(head[:4]) or chunk_layout(file, at) is not None:
            return
        chunk = Chunk(head[:4], at + form.head_bytes, struct.unpack_from(form.size, head, form.name_bytes)[0] - form.included_bytes)
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


HEAD = re.compile(
    rb"(?:RIF[FX]|RF64|BW64).{4}WAVE|FORM.{4}AIF[FC]|riff\x2e\x91\xcf\x11|caff\x00\x01"
    rb"|fLaC[\x00\x80]\x00\x00\x22"  # RFC 9639: with the head of its first block, whose size never differs.
    rb"|OggS\x00\x02|\x00\x00[\x00-\x03].ftyp|\x1a\x45\xdf\xa3(?:[\x80-\xff]|\x01.{7})\x42\x86"
    rb"|\.snd\x00\x00.{6}\x00\x00\x00[\x01-\x1f]"  # AU: all of its numbers but one are small, in 32 bits.
    rb"|#!AMR(?:-WB)?\n|Creative Voice File\x1a|FLV\x01[\x01\x04\x05]\x00\x00\x00\x09\x00\x00\x00\x00|" + re.escape(ASF_HEAD),
    re.DOTALL,
)
HEAD_BYTES = 20

CANDIDATES = re.compile(HEAD.pattern + b"|" + MP3_BEGINNING.pattern + b"|" + MP3_TAGGED.pattern, re.DOTALL)
CANDIDATE_BYTES = 42
"""Bytes of the longest candidate: HEAD, or the head of an MP3, which has to be looked at again."""

MAX_CANDIDATES = 10_000
"""How many candidates of a file are looked at, at most."""

FIRST_BLOCK, BLOCK = 1 << 12, 1 << 20
"""Bytes that are searched at once: few at first, because the head is often near."""


def begins(file: BinaryIO, at: int) -> bool:
    """Whether a sound begins at byte `at`, by its own head or by a tag in front of it."""
    file.seek(at)
    return bool(HEAD.match(file.read(HEAD_BYTES))) or mp3_begins(file, at)


class HeadSearch:
    """A search for the beginnings of sounds in one file. It ends after MAX_CANDIDATES, however many sounds there are."""

    def __init__(self) -> None:
        self._remaining_looks = MAX_CANDIDATES

    def next_begin(self, file: BinaryIO, begin: int) -> int | None:
        """The place of the first sound that begins at byte `begin` or later; None if none does."""
        return next((at for at in self.candidates(file, begin, CANDIDATES, CANDIDATE_BYTES) if begins(file, at)), None)

    def next_head(self, file: BinaryIO, begin: int, end: int) -> int | None:
        """The place of the first sound that begins with a head of its own, from `begin` to before `end`; None if none does."""
        return next((at for at in self.candidates(file, begin, HEAD, HEAD_BYTES) if at < end), None)

    def candidates(self, file: BinaryIO, begin: int, head: re.Pattern[bytes], most_bytes: int) -> Iterator[int]:
        """Yields places that match a head, until MAX_CANDIDATES were looked at. most_bytes: bytes of the longest match."""
        for at in find_heads(file, begin, head, most_bytes):
            if not self._remaining_looks:
                return
            self._remaining_looks -= 1
            yield at


def find_heads(file: BinaryIO, begin: int, head: re.Pattern[bytes], most_bytes: int) -> Iterator[int]:
    """Yields places that match a head. most_bytes: bytes of the longest match."""
    block = FIRST_BLOCK
    while True:
        file.seek(begin)
        data = file.read(block + most_bytes - 1)  # A match that begins in the block may end after it.
        for match in head.finditer(data):
            if match.start() < block:
                yield begin + match.start()
        if len(data) < block:
            return
        begin += block
        block = BLOCK
