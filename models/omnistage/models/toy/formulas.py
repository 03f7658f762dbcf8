"""The closed formulas of the toy models. Tests import them to know what an answer must be."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

WIDTH = 32
CODEBOOKS = 4
FRAMES_PER_ROW = 2
SAMPLES_PER_FRAME = 60
SAMPLE_RATE_HZ = 24000
NATURAL_LENGTH = 24
LIMBS = 4
"""A time stamp travels as four 16-bit numbers, which float32, codes and 16-bit samples all carry exactly."""


def token(seed: int, prompt: str, n: int) -> int:
    return (31 * seed + sum(map(ord, prompt)) + 7 * n) % 1000


def word(token_id: int) -> str:
    return f"w{token_id} "


def text(seed: int, prompt: str, length: int) -> str:
    """The whole answer of the toy Thinker."""
    return "".join(word(token(seed, prompt, n)) for n in range(length))


def row(token_id: int, width: int = WIDTH) -> NDArray[np.float32]:
    """[width] float32."""
    return (token_id + np.arange(width)).astype(np.float32)


def frames(rows: NDArray[np.float32]) -> NDArray[np.uint32]:
    """[n, width] rows to [2n, CODEBOOKS] codes."""
    first = rows[:, 0].astype(np.int64)[:, None, None]
    b = np.arange(FRAMES_PER_ROW)[None, :, None]
    q = np.arange(CODEBOOKS)[None, None, :]
    return ((first + 3 * b + 5 * q) % 1024).astype(np.uint32).reshape(-1, CODEBOOKS)


def samples(codes: NDArray[np.uint32], samples_per_frame: int = SAMPLES_PER_FRAME) -> NDArray[np.float32]:
    """[n, codebooks] codes to [n * samples_per_frame, 1] samples; only the first CODEBOOKS columns count."""
    total = codes[:, :CODEBOOKS].astype(np.int64).sum(axis=1)[:, None]
    step = np.arange(1, samples_per_frame + 1)[None, :]
    wave: NDArray[np.float32] = (((total * step) % 2048 - 1024) / 32768).astype(np.float32)
    return wave.reshape(-1, 1)


def audio(seed: int, prompt: str, length: int, samples_per_frame: int = SAMPLES_PER_FRAME) -> NDArray[np.float32]:
    """The whole sound of an answer of `length` tokens, [samples, 1]."""
    rows = np.stack([row(token(seed, prompt, n)) for n in range(length)])
    return samples(frames(rows), samples_per_frame)


def stamp() -> NDArray[np.int64]:
    """Now, as LIMBS numbers below 2^15, least first: monotonic microseconds, the same clock in every process of a host."""
    now = time.monotonic_ns() // 1000
    return np.array([now >> (15 * limb) & 0x7FFF for limb in range(LIMBS)])


def stamped_at(limbs: NDArray[np.integer]) -> float:
    """Seconds of time.monotonic() that a stamp was made at."""
    return sum(int(limb) << (15 * n) for n, limb in enumerate(limbs)) / 1e6
