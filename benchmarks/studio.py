"""A checkpoint that draws, loaded twice in this process: as our model, and as the pipeline of Diffusers. On a GPU, also the transformer of
Z-Image in its full size, with random weights, which take the same time as trained ones."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import diffusers
import numpy as np
import torch
from PIL import Image as pillow
from PIL.Image import Image

from benchmarks.figures import Figure, Report, median
from omnistage.models.conversation import Media
from omnistage.models.diffusers.folder import load_pipeline
from omnistage.models.diffusers.model import PROGRESS, DrawnModel, StepDrawing
from omnistage.models.diffusers.painter import Canvas
from omnistage.models.diffusers.pictures import IMAGE, PicturePainter
from omnistage.models.diffusers.plan import PNG
from omnistage.models.interface import DrawRequest, EncodedPicture, Preview, inputs_of
from omnistage.models.options import LoadOptions
from omnistage.models.registry import load
from omnistage.models.tiny.diffusers.pipelines import HIDDEN
from omnistage.models.tiny.makers import CheckpointOrder, make_tiny

STEPS = 20
GUIDANCE = 4.0
NEGATIVE = "grey"

Clock = Callable[[], float]


@dataclass(slots=True)
class RequestTimes:
    """When a request's events happened, in seconds of one clock (0: no preview came), and the bytes of its picture."""

    arrived_s: float
    first_preview_s: float = 0.0
    done_s: float = 0.0
    data: bytes = b""

    @property
    def taken_s(self) -> float:
        return self.done_s - self.arrived_s


@dataclass(slots=True)
class Calls:
    """When each call of a watched method began and ended, in seconds of one clock."""

    begun_s: list[float] = field(default_factory=list)
    ended_s: list[float] = field(default_factory=list)

    @property
    def each_s(self) -> list[float]:
        return [end_s - begin_s for begin_s, end_s in zip(self.begun_s, self.ended_s, strict=True)]

    @property
    def between_s(self) -> list[float]:
        """Seconds from the beginning of each call to the beginning of the next."""
        return [after - before for before, after in zip(self.begun_s, self.begun_s[1:], strict=False)]


@contextmanager
def watch_calls(owner: object, method: str, clock: Clock = time.process_time) -> Iterator[Calls]:
    """Note when each call of a method of `owner` begins and ends, while the context is open."""
    calls, real = Calls(), getattr(owner, method)

    def called(*arguments: Any, **keywords: Any) -> Any:
        calls.begun_s.append(clock())
        try:
            return real(*arguments, **keywords)
        finally:
            calls.ended_s.append(clock())

    with patch.object(owner, method, called):
        yield calls


class Studio:
    """Our model of a checkpoint. name: names the maker, which makes it in `folder`, of size small, if it is missing. family: options."""

    def __init__(
        self, name: str, folder: Path, device: str = "cpu", dtype: str = "float32", family: Mapping[str, Any] | None = None
    ) -> None:
        self.name, self._folder = name, folder / name
        if not self._folder.exists():
            make_tiny(name, self._folder, CheckpointOrder(size="small"))
        options = LoadOptions(path=self._folder, device=device, dtype=dtype, family=family or {})
        self.model = cast(DrawnModel[Any], load("diffusers", "diffusion", options))
        self.drawing = cast(StepDrawing, self.model._artist)
        self.painter = cast(PicturePainter, self.drawing._painter)

    def request(self, seed: int, side: int, *, guided: bool, prompt: str = "", previews: int = 0) -> DrawRequest:
        """A request for a picture of `side` x `side` pixels. Every seed is another client; without `prompt` it has another prompt too."""
        return DrawRequest(
            seed=seed,
            prompt=prompt or f"picture {seed}: a {'very ' * (seed % 4)}small house on a hill beside the sea",
            negative_prompt=NEGATIVE if guided else "",
            width=side,
            height=side,
            steps=STEPS,
            guidance_scale=GUIDANCE if guided else 0.0,
            previews=previews,
            client=f"client {seed}",
        )

    def editing(self, seed: int, side: int) -> DrawRequest:
        """A request that fits any family, guided if possible; with the least number of pictures that it needs, which then decide the
        size."""
        limits = self.painter.limits
        request = self.request(seed, 0 if limits.images[0] else side, guided=limits.guidable)
        pixels = np.random.default_rng(seed).integers(0, 256, (96, 96, 3), np.uint8)
        file = io.BytesIO()
        pillow.fromarray(pixels).save(file, "PNG")
        return replace(request, images=(Media(PNG, file.getvalue()),) * limits.images[0])

    # Ours

    async def watched(self, request: DrawRequest, after_s: float = 0.0, clock: Clock = time.process_time) -> RequestTimes:
        """Send a request after `after_s` seconds, and note when its events happen."""
        await asyncio.sleep(after_s)
        times = RequestTimes(clock())
        prepared = await self.model.prepare(request)
        async for piece in self.model.draw(prepared, inputs_of(), {IMAGE: 0, PROGRESS: 0}):
            if isinstance(piece, Preview) and not times.first_preview_s:
                times.first_preview_s = clock()
            if isinstance(piece, EncodedPicture):
                times.data = piece.data
        times.done_s = clock()
        return times

    async def together(self, requests: Sequence[DrawRequest], apart_s: float = 0.0) -> list[RequestTimes]:
        """Draw several requests at once, each sent `apart_s` seconds after the one before it."""
        return list(await asyncio.gather(*(self.watched(request, n * apart_s) for n, request in enumerate(requests))))

    # Diffusers'

    def pipeline(self) -> DiffusersPipeline:
        return DiffusersPipeline(self._folder)


class DiffusersPipeline:
    """The unchanged pipeline of Diffusers, for pictures from text."""

    def __init__(self, folder: Path) -> None:
        self._pipe: Any = load_pipeline(folder, torch.float32)
        self._pipe.set_progress_bar_config(disable=True)
        self._scale = "guidance_scale" if type(self._pipe).__name__ == "ZImagePipeline" else "true_cfg_scale"

    def called(self, request: DrawRequest) -> tuple[float, Image]:
        """CPU seconds of a picture, and the picture, which is not encoded."""
        begin_s = time.process_time()
        image = self._pipe(
            prompt=request.prompt,
            negative_prompt=request.negative_prompt or None,
            width=request.width,
            height=request.height,
            num_inference_steps=request.steps,
            generator=torch.Generator("cpu").manual_seed(request.seed),
            **{self._scale: request.guidance_scale},
        ).images[0]
        return time.process_time() - begin_s, image

    def step_s(self, request: DrawRequest) -> float:
        return median([self.called(request)[0] for _ in range(3)]) / request.steps


def most_apart(data: bytes, image: Image) -> int:
    """The largest difference between two pictures, of 255."""
    ours = np.asarray(pillow.open(io.BytesIO(data)).convert("RGB"), np.int16)
    return int(np.abs(ours - np.asarray(image.convert("RGB"), np.int16)).max())


ROUNDS = 3
FULL_SIZE_STEPS = 8
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
        return replace(self.studio.request(seed, side, guided=guided), steps=FULL_SIZE_STEPS)

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
