"""The closed formulas of the toy models. Tests import them to know the right answer."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

WIDTH = 32
CODEBOOKS = 4
FRAMES_PER_ROW = 2
SAMPLES_PER_FRAME = 60
SAMPLE_RATE_HZ = 24000
NATURAL_LENGTH = 24
VOCABULARY = 1000
LIMBS = 4
"""A time stamp travels as four 16-bit numbers, which float32, codes and 16-bit samples all carry exactly."""


def token(seed: int, prompt: str, n: int) -> int:
    return (31 * seed + sum(map(ord, prompt)) + 7 * n) % VOCABULARY


def later_token(first: int, n: int) -> int:
    """Token n of any toy Thinker's answer, from its token 0: a long prompt is summed up only once."""
    return (first + 7 * n) % VOCABULARY


def word(token_id: int) -> str:
    return f"w{token_id} "


def text(seed: int, prompt: str, length: int) -> str:
    """The whole answer of the toy Thinker."""
    return "".join(word(token(seed, prompt, n)) for n in range(length))


def row(token_id: int, width: int = WIDTH) -> NDArray[np.float32]:
    """The row of a token, [width] float32: token + j at place j."""
    return (token_id + np.arange(width)).astype(np.float32)


def frames(rows: NDArray[np.generic]) -> NDArray[np.uint32]:
    """The codes of rows: [n, width] -> [2n, CODEBOOKS]; code q of frame b of a row is (row[0] + 3 b + 5 q) mod 1024."""
    first = rows[:, 0].astype(np.int64)[:, None, None]
    b = np.arange(FRAMES_PER_ROW)[None, :, None]
    q = np.arange(CODEBOOKS)[None, None, :]
    return ((first + 3 * b + 5 * q) % 1024).astype(np.uint32).reshape(-1, CODEBOOKS)


def samples(codes: NDArray[np.uint32], samples_per_frame: int = SAMPLES_PER_FRAME) -> NDArray[np.float32]:
    """The sound of codes: [n, codebooks] -> [n * samples_per_frame, 1]; only the first CODEBOOKS columns count."""
    total = codes[:, :CODEBOOKS].astype(np.int64).sum(axis=1)[:, None]
    step = np.arange(1, samples_per_frame + 1)[None, :]
    wave: NDArray[np.float32] = (((total * step) % 2048 - 1024) / 32768).astype(np.float32)
    return wave.reshape(-1, 1)


def audio(seed: int, prompt: str, length: int, samples_per_frame: int = SAMPLES_PER_FRAME) -> NDArray[np.float32]:
    """The whole sound of an answer of `length` tokens, [samples, 1]."""
    rows = np.stack([row(token(seed, prompt, n)) for n in range(length)])
    return samples(frames(rows), samples_per_frame)


def stamp() -> NDArray[np.int64]:
    """The time now, in monotonic microseconds, as LIMBS numbers below 2^15, lowest first; all processes of a host have this clock."""
    now_us = time.monotonic_ns() // 1000
    return np.array([now_us >> (15 * limb) & 0x7FFF for limb in range(LIMBS)])


def stamped_at(limbs: NDArray[np.integer]) -> float:
    """The time.monotonic() seconds at which a stamp was made."""
    return sum(int(limb) << (15 * n) for n, limb in enumerate(limbs)) / 1e6


# The family toy-omni: pictures and sound go in, and everything that was said before decides what comes --------------------------------

OMNI_WIDTH = 8
PATCH = 2
"""Pixels of a side of a patch; pixels beyond the edges are black."""
HOP = 240
"""Samples of a sound that make one item."""
OMNI_CODEBOOKS = 2
TAIL = 3
"""Frames that a Talker makes after the last row, because speech has an end that no text stands for."""

Seen = str | NDArray[np.uint8] | NDArray[np.int16]
"""Text, a picture [height, width], or the samples [n] of a sound."""


def film(digest: bytes, *, use_audio: bool = False) -> NDArray[np.uint8]:
    """The picture as which a film is seen: the 32 bytes of its digest as pixels, [4, 8]; of a film that is also heard, its negative."""
    pixels = np.frombuffer(digest, np.uint8).reshape(4, 8)
    return 255 - pixels if use_audio else pixels


def items(parts: Sequence[Seen]) -> NDArray[np.int64]:
    """The items of a prompt: value, time, y and x of each, [n, 4]. A character is one item with its code point as value. A patch of a
    picture is one item with the sum of its pixels as value; all patches have the time of the first, and the picture takes as many positions
    as its longer side has patches (as M-RoPE in Qwen2-VL, arXiv 2409.12191, section 2.1). HOP samples of a sound are one item with their
    sum as value."""
    rows: list[NDArray[np.int64]] = []
    at = 0
    for part in parts:
        values = _values(part)
        height, width = values.shape
        y, x = np.indices(values.shape)
        if isinstance(part, np.ndarray) and part.ndim == 2:  # A picture.
            places, positions = np.stack([np.full_like(y, at), at + y, at + x]), max(height, width)
        else:
            places, positions = np.stack([at + x] * 3), width
        rows.append(np.concatenate([values[None], places]).reshape(4, -1).T)
        at += positions
    return np.concatenate([np.empty((0, 4), np.int64), *rows])


def _values(one: Seen) -> NDArray[np.int64]:
    """The values of one content's items, [rows, columns]: one row, but for a picture [patches down, patches across]."""
    if isinstance(one, str):
        return np.array([[ord(character) for character in one]], np.int64).reshape(1, -1)
    if one.ndim == 1:
        padded = np.pad(one.astype(np.int64), (0, -len(one) % HOP))
        summed: NDArray[np.int64] = padded.reshape(1, -1, HOP).sum(axis=2)
        return summed
    height, width = one.shape
    padded = np.pad(one.astype(np.int64), ((0, -height % PATCH), (0, -width % PATCH)))
    blocks: NDArray[np.int64] = padded.reshape(padded.shape[0] // PATCH, PATCH, -1, PATCH).sum(axis=(1, 3))
    return blocks


def next_place(prompt: NDArray[np.int64]) -> int:
    """The position at which the answer begins: after the largest position on any axis. prompt: as from `items`."""
    return int(prompt[:, 1:].max()) + 1 if len(prompt) else 0


def prompt_rows(prompt: NDArray[np.int64]) -> NDArray[np.uint16]:
    """The rows of the items, bfloat16 [n, OMNI_WIDTH]: (value + 3 t + 5 y + 7 x + j) mod 256."""
    summed = prompt @ np.array([1, 3, 5, 7])
    return bfloat16((summed[:, None] + np.arange(OMNI_WIDTH)) % 256)


def omni_token(seed: int, prompt: NDArray[np.int64], n: int) -> int:
    """Token n of the answer to a prompt's items, [rows, 4]: it depends on their sum and on the position where the answer begins."""
    summed = int((prompt @ np.array([1, 1, 2, 3])).sum())
    return (31 * seed + summed + 7 * (next_place(prompt) + n)) % VOCABULARY


def omni_rows(tokens: Sequence[int]) -> NDArray[np.uint16]:
    """The rows of tokens, bfloat16 [n, OMNI_WIDTH]: (token + j) mod 256."""
    return bfloat16((np.array(tokens, np.int64).reshape(-1, 1) + np.arange(OMNI_WIDTH)) % 256)


def voice_key(prompt: NDArray[np.int64], voice: int = 0) -> int:
    """The number that a Talker takes from a prompt's rows and items. voice: number of the voice that speaks."""
    return int(100 * voice + from_bfloat16(prompt_rows(prompt))[:, 0].sum() + prompt[:, 0].sum()) % 1024


def next_frame(before: Sequence[int], row: int, n: int) -> tuple[int, int]:
    """Frame n, from the frame before it and the first element of row n, which is 0 after the last row."""
    first = (3 * before[0] + row + n) % 1024
    return first, (5 * before[1] + first) % 1024


def omni_frames(prompt: NDArray[np.int64], tokens: Sequence[int], voice: int = 0) -> NDArray[np.uint32]:
    """All frames of an answer, [tokens + TAIL, OMNI_CODEBOOKS]. The frame before the first is (voice_key, 0)."""
    frame, frames = (voice_key(prompt, voice), 0), []
    for n, row in enumerate([*(token % 256 for token in tokens), *[0] * TAIL]):
        frame = next_frame(frame, row, n)
        frames.append(frame)
    return np.array(frames, np.uint32)


def bfloat16(values: NDArray[np.int64]) -> NDArray[np.uint16]:
    """The bits of whole numbers below 256, which bfloat16 represents exactly."""
    bits: NDArray[np.uint16] = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return bits


def from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.int64]:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.int64)


# The family toy-film: pictures, films and sound -----------------------------------------------------------------------------------------


def noise(seed: int, plane: NDArray[np.int64], y: NDArray[np.int64], x: NDArray[np.int64]) -> NDArray[np.int64]:
    """The beginning of a drawing, [planes, height, width]: (seed + 3 plane + 5 y + 7 x) mod 256."""
    latent: NDArray[np.int64] = (seed % 256 + np.add.outer(np.add.outer(3 * plane, 5 * y), 7 * x)) % 256
    return latent


def steer(prompt: str, negative_prompt: str, scale: int, shown: int = 0) -> int:
    """The number that each step adds: the sum of the negative prompt, `scale` times the way to the prompt's, and `shown`, the images'."""
    positive, negative = (sum(map(ord, text)) for text in (prompt, negative_prompt))
    return (negative + scale * (positive - negative) + shown) % 256


def expert(number: int) -> int:
    """The factor with which part `number` of the model multiplies: 3, 5, 7 ..."""
    return 3 + 2 * number


def latent_after(start: NDArray[np.int64], added: int, steps: int) -> NDArray[np.int64]:
    """The latent after `steps` steps x <- (3 x + added + step) mod 256: 3^n x + the sum of 3^(n - s) (added + s)."""
    total = sum(pow(3, steps - step, 256) * (added + step) for step in range(1, steps + 1))
    latent: NDArray[np.int64] = (pow(3, steps, 256) * start + total) % 256
    return latent


def layer(latent: NDArray[np.int64], number: int) -> NDArray[np.uint8]:
    """A layer of a picture, [height, width]: 16 brighter than the layer below."""
    pixels: NDArray[np.uint8] = ((latent + 16 * number) % 256).astype(np.uint8)
    return pixels


def film_sound(seed: int, added: int, first: int, count: int) -> NDArray[np.float32]:
    """The film's samples from `first` on, [count, 1]: ((seed + added + 5 n) mod 2048 - 1024) / 32768."""
    n = np.arange(first, first + count)[:, None]
    sound: NDArray[np.float32] = (((seed % 2048 + added + 5 * n) % 2048 - 1024) / 32768).astype(np.float32)
    return sound
