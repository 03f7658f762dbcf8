"""Pieces of a film's file that follow its head: fragments of MP4 (ISO/IEC 14496-12) and clusters of WebM (RFC 9559). FFmpeg's own pieces
are complete only with the next frame, and have wrong times if sound lies between frames."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

MOOF_IS_BASE = 0x020000
RUN_SAYS = 0x000701
"""The contents of a run: the place of its data, and for each sample its duration, size and flags."""
KEY, DEPENDENT = 0x02000000, 0x01010000
EBML_KEY = 0x80


class EncodedSample(NamedTuple):
    """A frame or packet of sound as an encoder made it. track: from 1 on, as in the file's head. time, duration: in the track's ticks."""

    track: int
    time: int
    duration: int
    is_key: bool  # Whether a player needs no earlier samples for it.
    data: bytes


Wrap = Callable[[int, Sequence[EncodedSample]], bytes]
"""Makes a piece of a file. Takes the number of the piece, from 1 on, and its samples, ordered by track and then by time."""


def fragment(number: int, samples: Sequence[EncodedSample]) -> bytes:
    """A fragment of MP4 with these samples, as Wrap says. Times are not negative."""
    tracks = [(track, list(group)) for track, group in groupby(samples, key=lambda sample: sample.track)]
    blank = _moof(number, tracks, 0)
    moof = _moof(number, tracks, len(blank) + 8)
    return moof + _box(b"mdat", b"".join(sample.data for sample in samples))


def _moof(number: int, tracks: Sequence[tuple[int, Sequence[EncodedSample]]], offset: int) -> bytes:
    """The head of a fragment. tracks: number and samples of each. offset: place of the first sample, counted from this head on."""
    parts = [_box(b"mfhd", struct.pack(">II", 0, number))]
    for track, samples in tracks:
        head = struct.pack(">II", MOOF_IS_BASE, track)
        begin = struct.pack(">IQ", 1 << 24, samples[0].time)
        run = struct.pack(">III", RUN_SAYS, len(samples), offset)
        run += b"".join(struct.pack(">III", one.duration, len(one.data), KEY if one.is_key else DEPENDENT) for one in samples)
        parts.append(_box(b"traf", _box(b"tfhd", head) + _box(b"tfdt", begin) + _box(b"trun", run)))
        offset += sum(len(one.data) for one in samples)
    return _box(b"moof", b"".join(parts))


def _box(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", 8 + len(body)) + name + body


def cluster(number: int, samples: Sequence[EncodedSample]) -> bytes:
    """A cluster of WebM with these samples, as Wrap says, by time, as browsers need it. Times are milliseconds, at most 32 s apart."""
    in_turn = sorted(samples, key=lambda sample: sample.time)
    begin = in_turn[0].time
    blocks = [_element(0xE7, begin.to_bytes(8))]
    for sample in in_turn:
        head = struct.pack(">BhB", 0x80 | sample.track, sample.time - begin, EBML_KEY if sample.is_key else 0)
        blocks.append(_element(0xA3, head + sample.data))
    return _element(0x1F43B675, b"".join(blocks))


def _element(name: int, body: bytes) -> bytes:
    return name.to_bytes((name.bit_length() + 7) // 8) + (1 << 56 | len(body)).to_bytes(8) + body


def with_lengths(data: bytes) -> bytes:
    """A frame of H.264 as MP4 has it: each unit begins with its length, in place of a mark (three bytes that no unit contains)."""
    units = [unit.rstrip(b"\x00") for unit in data.split(b"\x00\x00\x01")]
    return b"".join(struct.pack(">I", len(unit)) + unit for unit in units if unit)
