"""The transformer of Z-Image in its full size on a GPU, with random weights, which take the same time but draw noise: the cost of a step
for pictures of one and of many requests, and the cost of the work around it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import torch

from benchmarks.figures import Figure, Report, median
from benchmarks.studio import Studio, watch_calls
from omnistage.models.diffusers.painter import Canvas
from omnistage.models.interface import DrawRequest
from omnistage.models.tiny.diffusers.pictures import HIDDEN

ROUNDS = 3
STEPS = 8
SIDES = (512, 1024)
COUNTS = (1, 2, 4, 8)


def transformer() -> Any:
    """The transformer with random weights. It is made in bfloat16 at once, because in float32 it might not fit."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = diffusers.ZImageTransformer2DModel(cap_feat_dim=HIDDEN)
    finally:
        torch.set_default_dtype(before)
    for name, weight in model.named_parameters():
        if name.endswith("pad_token"):
            torch.nn.init.normal_(weight)  # The class leaves these weights uninitialised.
    return model.eval().requires_grad_(False)


class Easel:
    """The small checkpoint with the full-size transformer in it, so that the rest of a picture takes nearly no time."""

    def __init__(self, folder: Path) -> None:
        self.studio = Studio("z-image", folder, "cuda", "bfloat16")
        self.studio.painter.pipe.transformer = None  # Freed before the large one is made.
        self.studio.painter.pipe.transformer = transformer()

    def request(self, seed: int, side: int, *, guided: bool = False) -> DrawRequest:
        return replace(self.studio.request(seed, side, guided=guided), steps=STEPS)

    async def canvases(self, count: int, side: int) -> list[Canvas]:
        """Begin `count` pictures of `side` x `side` pixels."""
        painter, canvases = self.studio.painter, list[Canvas]()
        for seed in range(count):
            plan = await self.studio.model.prepare(self.request(seed, side))
            with torch.inference_mode():
                canvases.append(painter.canvas(plan, painter.encode(plan), 0))
        return canvases

    def pass_s(self, canvases: Sequence[Canvas]) -> float:
        """Seconds of one pass of the transformer for all these pictures together."""
        torch.cuda.synchronize()
        begin_s = time.perf_counter()
        with torch.inference_mode():
            self.studio.painter.forward(canvases)
        torch.cuda.synchronize()
        return time.perf_counter() - begin_s

    async def step_s(self, count: int, side: int, seed: int) -> float:
        """Seconds of a step of the engine while it draws `count` pictures together."""
        with watch_calls(self.studio.painter, "velocities", time.perf_counter) as calls:
            await self.studio.together([self.request(seed + n, side) for n in range(count)])
        return median(calls.between_s)


async def on_gpu(report: Report, folder: Path) -> None:
    """Measure passes of the transformer with several pictures, and what the engine adds to a step."""
    easel, device_name = Easel(folder), torch.cuda.get_device_name()
    for side in SIDES:
        passes = dict[int, float]()
        for count in COUNTS:
            canvases = await easel.canvases(count, side)
            easel.pass_s(canvases)
            passes[count] = median([easel.pass_s(canvases) for _ in range(ROUNDS)])
            note = f"one pass of {count} pictures, not guided, {side} px, bfloat16, {device_name}; median of {ROUNDS}"
            report.add(Figure(f"pass_of_{count}_{side}px", passes[count], "s", "", note))
            if count > 1:
                report.add(Figure(f"x_throughput_of_{count}_{side}px", count * passes[1] / passes[count], "x", "", "over passes of one"))
        await easel.step_s(1, side, 0)
        for count in (COUNTS[0], COUNTS[-1]):
            share = median([await easel.step_s(count, side, 10 * turn) / passes[count] - 1 for turn in range(ROUNDS)])
            note = f"from one pass to the next through the model, over the bare pass; {count} pictures"
            report.add(Figure(f"engine_overhead_of_a_step_{count}_{side}px", share, "", "", note))
    report.add(Figure("memory", torch.cuda.max_memory_allocated() / 2**30, "GiB", "", f"most that was allocated, {device_name}"))
    await easel.studio.model.close()
