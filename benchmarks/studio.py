"""A checkpoint that draws pictures or films, loaded twice in this process: as our model, and as the pipeline of Diffusers. Seconds are CPU
time of this process, because it is never idle from the first request to the last result."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image as pillow

from omnistage.models.diffusers.films import PIXELS
from omnistage.models.diffusers.folder import load_pipeline
from omnistage.models.diffusers.model import PROGRESS, DrawnModel
from omnistage.models.diffusers.pictures import IMAGE
from omnistage.models.interface import DrawRequest, EncodedPicture, StepsDone, TensorRows, inputs_of
from omnistage.models.options import LoadOptions
from omnistage.models.registry import load

STEPS = 20
GUIDANCE = 4.0

Pixels = NDArray[np.uint8]
"""[height, width, 3] of a picture, [frames, height, width, 3] of a film."""


def draw_request(seed: int, side: int, *, guided: bool = False, frames: int = 0, steps: int = STEPS) -> DrawRequest:
    """A request for a picture of `side` x `side` pixels, or for a film of so many frames of this size. Every seed is another client with
    another prompt."""
    return DrawRequest(
        seed=seed,
        prompt=f"number {seed}: a {'very ' * (seed % 4)}small house on a hill beside the sea",
        negative_prompt="grey" if guided else "",
        width=side,
        height=side,
        frames=frames,
        steps=steps,
        guidance_scale=GUIDANCE if guided else float(frames > 0),  # A scale that switches guidance off: 1 for films, 0 for pictures.
        client=f"client {seed}",
    )


@dataclass(slots=True)
class DrawingTimes:
    """When a result was asked for, its steps ended, its first frame came and it ended, in seconds (0: there was no such event); the file of
    a picture, or the rows of pixels of a film."""

    arrived_s: float
    drawn_s: float = 0.0
    first_s: float = 0.0
    done_s: float = 0.0
    file: bytes = b""
    rows: list[Any] = field(default_factory=list)

    def pixels(self, request: DrawRequest) -> Pixels:
        """The picture, or the film without its encoding."""
        if self.file:
            return np.asarray(pillow.open(io.BytesIO(self.file)).convert("RGB"))
        frames: Pixels = np.concatenate(self.rows).reshape(-1, request.height, request.width, 3)
        return frames


class Studio:
    """Our model of the checkpoint in `folder`. family: options of its family."""

    def __init__(self, folder: Path, device: str = "cpu", dtype: str = "float32", family: Mapping[str, Any] | None = None) -> None:
        options = LoadOptions(path=folder, device=device, dtype=dtype, family=family or {})
        self.model = cast(DrawnModel[Any], load("diffusers", "diffusion", options))

    async def draw(self, request: DrawRequest, after_s: float = 0.0, *, keeps_rows: bool = True) -> DrawingTimes:
        """Draw after `after_s` seconds, and note when the events happen. keeps_rows: keep the pixels of a film."""
        await asyncio.sleep(after_s)
        drawing = DrawingTimes(time.process_time())
        prepared = await self.model.prepare(request)
        async for piece in self.model.draw(prepared, inputs_of(), {PIXELS if request.frames else IMAGE: 0, PROGRESS: 0}):
            if isinstance(piece, StepsDone):
                drawing.drawn_s = time.process_time()
            elif isinstance(piece, TensorRows):
                drawing.first_s = drawing.first_s or time.process_time()
                drawing.rows += [piece.rows] if keeps_rows else []
            elif isinstance(piece, EncodedPicture):
                drawing.file = piece.data
        drawing.done_s = time.process_time()
        return drawing

    async def draw_together(self, requests: Sequence[DrawRequest], apart_s: float = 0.0) -> list[DrawingTimes]:
        """Draw several results at once, each asked for `apart_s` seconds after the one before it."""
        return list(await asyncio.gather(*(self.draw(request, n * apart_s) for n, request in enumerate(requests))))


class DiffusersPipeline:
    """The unchanged pipeline of Diffusers of the checkpoint in `folder`, for pictures or films from text."""

    def __init__(self, folder: Path) -> None:
        self._pipe: Any = load_pipeline(folder, torch.float32)
        self._pipe.set_progress_bar_config(disable=True)
        self._scale = "true_cfg_scale" if type(self._pipe).__name__.startswith("QwenImage") else "guidance_scale"

    def draw(self, request: DrawRequest) -> tuple[float, Pixels]:
        """CPU seconds of a result, and the result, which is not encoded."""
        begin_s = time.process_time()
        result = self._pipe(
            prompt=request.prompt,
            negative_prompt=request.negative_prompt or None,
            width=request.width,
            height=request.height,
            num_inference_steps=request.steps,
            generator=torch.Generator("cpu").manual_seed(request.seed),
            output_type="np",
            **({"num_frames": request.frames} if request.frames else {}),
            **{self._scale: request.guidance_scale},
        )
        values = (result.frames if request.frames else result.images)[0]
        return time.process_time() - begin_s, (values * 255).round().astype(np.uint8)
