"""A corpus of media files: every format with every lie of a header and every feature of a container that goes with it.

A feature is one function; the products of tables make the cases, and the seed of a test their sizes, rates and contents.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CorpusFile:
    """file: as somebody sends it. plain: what a reference is to decode: the same file, or one that shows the same and does not lie. then:
    what comes after it, if that is a file of its own. cut: the end of the file is missing and something in it tells, so that it has to be
    refused. torn: nothing tells, and the last of what is there may be in part. alike: how far values may be from those of the reference on
    the average, of full scale; 0: no bit may differ."""

    file: bytes
    plain: bytes
    then: bytes = b""
    cut: bool = False
    torn: bool = False
    alike: float = 0.0
    use_audio: bool = False


Maker = Callable[[random.Random], CorpusFile]


def cut(file: bytes, chance: random.Random, *, tells: bool) -> bytes:
    """Without its end. Where nothing tells that, enough is left for any decoder to begin."""
    return file[: round(len(file) * chance.uniform(0.05 if tells else 0.5, 0.97))]
