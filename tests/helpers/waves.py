"""Codes into a Code2Wav, and what comes out; and how that of Qwen2.5-Omni is loaded and steps."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnistage.models.interface import Code2WavModel, Piece, Sound, WaveRequest
from omnistage.models.options import LoadOptions
from omnistage.models.qwen2_5_omni.wave.code2wav import FlowCode2Wav, load_code2wav, sound
from omnistage.models.qwen2_5_omni.wave.window import Flow, Vocoding

Codes = NDArray[np.uint32]
Samples = NDArray[np.float32]

SAMPLES = 480
"""The samples of a code."""
BLOCK = 12
ENDS = (8292, 8294)
STREAMED = ("latency", "balanced", "quality")


def loaded(folder: Path, **options: int | str) -> FlowCode2Wav:
    return load_code2wav(folder, LoadOptions(path=folder, family=options))


def drawn(source: random.Random, count: int) -> Codes:
    return np.array([[source.randrange(8193)] for _ in range(count)], np.uint32).reshape(-1, 1)


async def arriving(codes: Codes, first: int, size: Callable[[], int]) -> AsyncIterator[Piece]:
    """Codes from the place `first` on, in pieces; the end comes with the last of them. Memory of a piece is used again for the next."""
    while True:
        part = codes[first : first + size()].copy()
        yield Piece("codes", first, first + len(part) >= len(codes), part)
        first += len(part)
        part.fill(1 << 31)
        if first >= len(codes):
            return


async def sounds(
    model: Code2WavModel[Any],
    codes: Codes,
    request: WaveRequest,
    *,
    sample: int = 0,
    first: int | None = None,
    size: Callable[[], int] = lambda: 1 << 20,
) -> list[Sound]:
    """first: code that comes first; None: the first that the model asks for."""
    prepared = await model.prepare(request)
    first = model.first_frame(prepared, sample) if first is None else first
    return [sound async for sound in model.decode(prepared, arriving(codes, first, size), {"audio": sample})]


async def samples(model: Code2WavModel[Any], codes: Codes, request: WaveRequest, **how: int) -> Samples:
    return joined(await sounds(model, codes, request, **how))  # type: ignore[arg-type]


def joined(made: Sequence[Sound]) -> Samples:
    return np.concatenate([np.empty(0, np.float32), *(sound.samples[:, 0] for sound in made)])


def solved(model: FlowCode2Wav, flow: Flow) -> Flow:
    while not flow.done:
        model.windows.step([flow])
    return flow


def sounded(model: FlowCode2Wav, vocoding: Vocoding) -> Sound:
    while not vocoding.done:
        model.windows.step([vocoding])
    return sound(vocoding)


def decibels(made: Samples, expected: Samples) -> float:
    """The decibels of the signal over the difference."""
    return float(10 * np.log10((expected.astype(np.float64) ** 2).mean() / ((made.astype(np.float64) - expected) ** 2).mean()))
