"""Computes when the requests of an open loop come; they do not wait for earlier answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np

Process = Literal["poisson", "constant", "burst"]

_DRAWN = 256
"""How many gaps are drawn at once."""


def due_times_s(process: Process, rate: float, seed: int = 0, burst: int = 1) -> Iterator[float]:
    """Yields for ever when the next request is due, in seconds after the beginning; on average `rate` requests a second.

    constant: from 0 on, equally far apart. poisson: gaps, also before the first request, from the exponential distribution; the same seed
    gives the same times. burst: `burst` requests at the same time, from 0 on, and these groups equally far apart.
    """
    match process:
        case "constant":
            return _constant(rate, 1)
        case "burst":
            return _constant(rate, burst)
        case "poisson":
            return _poisson(rate, seed)


def _constant(rate: float, together: int) -> Iterator[float]:
    """Yields each time `together` times, in seconds: 0, together / rate, and so on."""
    number = 0
    while True:
        # Each time comes from a division of its own: a sum of gaps would drift.
        yield number // together * together / rate
        number += 1


def _poisson(rate: float, seed: int) -> Iterator[float]:
    """Yields times in seconds, with random gaps of 1 / rate seconds on average."""
    rng = np.random.default_rng(seed)
    at_s = 0.0
    while True:
        for gap_s in rng.exponential(1.0 / rate, _DRAWN):
            at_s += float(gap_s)
            yield at_s
