"""The transformer of Z-Image in its full size on a GPU, with random weights, which take the same time as trained ones: passes with several
pictures, and what the engine adds to a step."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import diffusers
import torch

from benchmarks.figures import Benchmark, Figure, median
from benchmarks.studio import Studio, draw_request
from omnistage.models.diffusers.model import StepDrawing
from omnistage.models.diffusers.painter import Canvas
from omnistage.models.diffusers.pictures import PicturePainter
from omnistage.models.interface import DrawRequest
from omnistage.models.tiny.diffusers.pipelines import HIDDEN
from omnistage.models.tiny.makers import CheckpointOrder, make_tiny

ROUNDS = 3
STEPS = 8
SIDES = (512, 1024)
COUNTS = (1, 2, 4, 8)
"""Pictures of a pass."""


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
        make_tiny("z-image", folder, CheckpointOrder(size="small"))
        self.studio = Studio(folder, "cuda", "bfloat16")
        self.painter = cast(PicturePainter, cast(StepDrawing, self.studio.model._artist)._painter)
        self.painter.pipe.transformer = None  # Freed before the large one is made.
        self.painter.pipe.transformer = transformer()

    def request(self, seed: int, side: int) -> DrawRequest:
        return replace(draw_request(seed, side), steps=STEPS)

    async def canvases(self, count: int, side: int) -> list[Canvas]:
        """Begin `count` pictures of `side` x `side` pixels."""
        canvases = list[Canvas]()
        for seed in range(count):
            plan = await self.studio.model.prepare(self.request(seed, side))
            with torch.inference_mode():
                canvases.append(self.painter.canvas(plan, self.painter.encode(plan), 0))
        return canvases

    def pass_s(self, canvases: Sequence[Canvas]) -> float:
        """Seconds of one pass of the transformer for all these pictures together."""
        torch.cuda.synchronize()
        begin_s = time.perf_counter()
        with torch.inference_mode():
            self.painter.forward(canvases)
        torch.cuda.synchronize()
        return time.perf_counter() - begin_s

    async def step_s(self, count: int, side: int, seed: int) -> float:
        """Seconds of a step of the engine while it draws `count` pictures together."""
        begins_s, velocities = list[float](), self.painter.velocities

        def note(*arguments: Any, **keywords: Any) -> Any:
            begins_s.append(time.perf_counter())
            return velocities(*arguments, **keywords)

        with patch.object(self.painter, "velocities", note):
            await self.studio.draw_together([self.request(seed + n, side) for n in range(count)])
        return median([after - before for before, after in itertools.pairwise(begins_s)])


async def measure(benchmark: Benchmark) -> None:
    """Measure passes of the transformer with several pictures, and what the engine adds to a step."""
    easel, device_name = Easel(benchmark.folder / "z-image"), torch.cuda.get_device_name()
    rounds, sides, counts = benchmark.size((ROUNDS, SIDES, COUNTS), (1, SIDES[:1], COUNTS[:2]))
    for side in sides:
        passes_s = dict[int, float]()
        for count in counts:
            canvases = await easel.canvases(count, side)
            easel.pass_s(canvases)
            passes_s[count] = median([easel.pass_s(canvases) for _ in range(rounds)])
            note = f"one pass of {count} pictures, not guided, {side} px, bfloat16, {device_name}; median of {rounds}"
            benchmark.add(Figure(f"pass_of_{count}_{side}px", passes_s[count], "s", "", note))
            if count > 1:
                speed = count * passes_s[1] / passes_s[count]
                benchmark.add(Figure(f"x_throughput_of_{count}_{side}px", speed, "x", "", "over passes of one"))
        await easel.step_s(1, side, 0)
        for count in (counts[0], counts[-1]):
            share = median([await easel.step_s(count, side, 10 * turn) / passes_s[count] - 1 for turn in range(rounds)])
            note = f"from one pass to the next through the model, over the bare pass; {count} pictures"
            benchmark.add(Figure(f"engine_overhead_of_a_step_{count}_{side}px", share, "", "", note))
    memory = torch.cuda.max_memory_allocated() / 2**30
    benchmark.add(Figure("memory", memory, "GiB", "", f"most that was allocated, {device_name}"))
    await easel.studio.model.close()
