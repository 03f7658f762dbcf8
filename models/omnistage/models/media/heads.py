"""The heads with which sounds in files begin. They are so long that no samples look like a head. Runs in the decoding process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import BinaryIO

from omnistage.models.media import mp3
from omnistage.models.media.wholeness import ASF_HEAD

HEAD = re.compile(
    rb"(?:RIF[FX]|RF64|BW64).{4}WAVE|FORM.{4}AIF[FC]|riff\x2e\x91\xcf\x11|caff\x00\x01"
    rb"|fLaC[\x00\x80]\x00\x00\x22"  # RFC 9639: with the head of its first block, whose size never differs.
    rb"|OggS\x00\x02|\x00\x00[\x00-\x03].ftyp|\x1a\x45\xdf\xa3(?:[\x80-\xff]|\x01.{7})\x42\x86"
    rb"|\.snd\x00\x00.{6}\x00\x00\x00[\x01-\x1f]"  # AU: all of its numbers but one are small, in 32 bits.
    rb"|#!AMR(?:-WB)?\n|Creative Voice File\x1a|FLV\x01[\x01\x04\x05]\x00\x00\x00\x09\x00\x00\x00\x00|" + re.escape(ASF_HEAD),
    re.DOTALL,
)
HEAD_BYTES = 20

CANDIDATES = re.compile(HEAD.pattern + b"|" + mp3.BEGINNING.pattern + b"|" + mp3.TAGGED.pattern, re.DOTALL)
CANDIDATE_BYTES = 42
"""Bytes of the longest candidate: HEAD, or the head of an MP3, which has to be looked at again."""

MOST = 10_000
"""How many candidates of a file are looked at, at most."""

FIRST_BLOCK, BLOCK = 1 << 12, 1 << 20
"""Bytes that are searched at once: few at first, because the head is often near."""


def begins(file: BinaryIO, at: int) -> bool:
    """Whether a sound begins at byte `at`, by its own head or by a tag in front of it."""
    file.seek(at)
    return bool(HEAD.match(file.read(HEAD_BYTES))) or mp3.begins(file, at)


class HeadSearch:
    """A search for the beginnings of sounds in one file. It ends after MOST candidates, however many sounds there are."""

    def __init__(self) -> None:
        self._left = MOST  # How many more candidates may be looked at.

    def next_begin(self, file: BinaryIO, begin: int) -> int | None:
        """The place of the first sound that begins at byte `begin` or later; None if none does."""
        return next((at for at in self.candidates(file, begin, CANDIDATES, CANDIDATE_BYTES) if begins(file, at)), None)

    def next_head(self, file: BinaryIO, begin: int, end: int) -> int | None:
        """The place of the first sound that begins with a head of its own, from `begin` to before `end`; None if none does."""
        return next((at for at in self.candidates(file, begin, HEAD, HEAD_BYTES) if at < end), None)

    def candidates(self, file: BinaryIO, begin: int, head: re.Pattern[bytes], most_bytes: int) -> Iterator[int]:
        """Yields places that match a head, until MOST were looked at. most_bytes: bytes of the longest match."""
        for at in find_heads(file, begin, head, most_bytes):
            if not self._left:
                return
            self._left -= 1
            yield at


def find_heads(file: BinaryIO, begin: int, head: re.Pattern[bytes], most_bytes: int) -> Iterator[int]:
    """Yields places that match a head. most_bytes: bytes of the longest match."""
    block = FIRST_BLOCK
    while True:
        file.seek(begin)
        data = file.read(block + most_bytes - 1)
        for one in head.finditer(data):
            if one.start() < block:
                yield begin + one.start()
        if len(data) < block:
            return
        begin += block
        block = BLOCK
