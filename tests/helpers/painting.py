"""A pipeline of Diffusers beside the painter that draws with its modules, from one small checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from helpers.drawings import checkpoint, writable
from omnistage.models.conversation import Media
from omnistage.models.diffusers.folder import load_pipeline, read_index
from omnistage.models.diffusers.loading import PAINTERS
from omnistage.models.diffusers.options import AREA, Defaults, DiffusersOptions
from omnistage.models.diffusers.painter import Canvas
from omnistage.models.diffusers.pictures import PicturePainter
from omnistage.models.diffusers.plan import DrawingPlan, SourcePicture, plan_drawing
from omnistage.models.interface import DrawRequest
from omnistage.models.memory import TensorCache

CLOSE = 1e-5
SMALL_AREA = 128 * 128
SIDE = 64
_SIZES = {
    "qwen-image-edit": "qwenimage.pipeline_qwenimage_edit",
    "qwen-image-edit-plus": "qwenimage.pipeline_qwenimage_edit_plus",
    "qwen-image-layered": "qwenimage.pipeline_qwenimage_layered",
    "longcat-image-edit": "longcat_image.pipeline_longcat_image_edit",
}
"""Where the pipelines that edit take the area from that they resize pictures to; nothing else of them can be told a smaller one."""

Pixels = NDArray[np.uint8]


def changed(
    name: str, folder: Path, class_name: str = "", scheduler: str = "", config: Mapping[str, Any] | None = None, size: str = "tiny"
) -> Path:
    """A copy of a checkpoint with another pipeline or another scheduler, where they are named. folder: it must not be there yet."""
    made = writable(name, folder, size)
    index = json.loads((made / "model_index.json").read_text())
    index |= {"_class_name": class_name} if class_name else {}
    if scheduler:
        index["scheduler"] = ["diffusers", scheduler]
        getattr(diffusers, scheduler)(**(config or {})).save_pretrained(made / "scheduler")
    (made / "model_index.json").write_text(json.dumps(index))
    return made


@dataclass(frozen=True)
class PipelinePair:
    """Both compute with the same modules in float32."""

    name: str
    pipe: Any
    painter: PicturePainter
    sent: dict[tuple[SourcePicture, ...], tuple[Pixels, ...]] = field(default_factory=dict)
    """Pictures of plans, by their sources."""

    @property
    def edits(self) -> int:
        """Most pictures that it begins from."""
        return self.painter.limits.images[1]

    def plan(self, prompt: str, images: Sequence[Pixels] = (), **asked: Any) -> DrawingPlan:
        """The plan of a small picture. images: [height, width, 4], which `published` gets as they are."""
        media = tuple(Media("image/png", b"-") for _ in images)
        request = replace(DrawRequest(seed=0, prompt=prompt, images=media), **asked)
        if not self.edits and not request.width:
            request = replace(request, width=SIDE, height=SIDE)
        plan = plan_drawing(request, self.painter.limits, self.name)
        given = tuple(self.painter.edited(plan, self._shown(image)) for image in images)
        made = self.painter.sized(replace(plan, images=given, sources=tuple(SourcePicture(image.tobytes()[:999]) for image in images)))
        self.painter.check_steps(made)
        self.sent[made.sources] = tuple(images)
        return made

    def _shown(self, image: Pixels) -> Image.Image:
        """As a decoder gives it."""
        return Image.fromarray(image) if self.name == "qwen-image-layered" else Image.fromarray(image).convert("RGB")

    def begun(self, plan: DrawingPlan, number: int = 0) -> Canvas:
        return self.painter.canvas(plan, self.painter.encode(plan), number)

    def drawn(self, *plans: DrawingPlan, together: bool = True) -> list[Canvas]:
        """All of them, each joining one step after the one before it; or one after the other."""
        if not together:
            return [canvas for plan in plans for canvas in self.drawn(plan)]
        with torch.inference_mode():
            canvases = [self.begun(plan) for plan in plans]
            joined = 0
            while not all(canvas.is_drawn for canvas in canvases):
                joined += 1
                drawing = [canvas for canvas in canvases[:joined] if not canvas.is_drawn]
                self.painter.forward(drawing)
                for canvas in drawing:
                    self.painter.advance(canvas)
        return canvases

    def images(self, canvas: Canvas) -> list[Image.Image]:
        with torch.inference_mode():
            return list(self.painter.images(self.painter.grids(canvas.latents, canvas.plan)))

    def published(self, plan: DrawingPlan) -> tuple[torch.Tensor, list[Image.Image]]:
        """Final latents and pictures of the pipeline itself."""
        said: dict[str, Any] = {
            "prompt": plan.prompt,
            "negative_prompt": plan.negative,
            "num_inference_steps": plan.steps,
            "generator": torch.Generator().manual_seed(plan.seed),
            "true_cfg_scale" if self.name.startswith("qwen") else "guidance_scale": plan.guidance,
        }
        if self.name == "longcat-image":
            said["enable_prompt_rewrite"] = False
        if self.edits:
            images = [self._shown(image) for image in self.sent[plan.sources]]
            said["image"] = images if self.name == "qwen-image-edit-plus" else images[0]
            if self.name == "qwen-image-layered":
                width, height = plan.images[0].resized[0].size
                said |= {"layers": plan.layers, "resolution": 1024 if width * height > SMALL_AREA * 3 / 5 else 640}
        else:
            said |= {"width": plan.width, "height": plan.height}
        said |= {"sigmas": np.array(plan.sigmas)} if plan.sigmas else {}
        said |= dict(plan.own_options)
        with _last_latents(self.pipe) as latents, _smaller(self.name):
            images = self.pipe(**said).images
        return latents(), images[0] if isinstance(images[0], list) else images


def pipeline_of(folder: Path) -> Any:
    """The pipeline of Diffusers itself, in float32, which shows no progress."""
    pipe: Any = load_pipeline(folder, torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@cache
def pair(name: str, folder: Path | None = None) -> PipelinePair:
    """One of drawings.NAMES. folder: of another checkpoint of it."""
    folder = folder or checkpoint(name)
    return beside(name, folder, pipeline_of(folder), DiffusersOptions(condition_area=SMALL_AREA), 1 << 26)


def beside(name: str, folder: Path, pipe: Any, chosen: DiffusersOptions, cache_bytes: int = 0) -> PipelinePair:
    """A painter beside this pipeline."""
    painter = painter_of(folder, pipe, chosen, cache_bytes)
    assert isinstance(painter, PicturePainter)
    return PipelinePair(name, pipe, painter)


def painter_of(folder: Path, pipe: Any, chosen: DiffusersOptions, cache_bytes: int = 0) -> Any:
    """The painter that draws with the modules of a pipeline. cache_bytes: for texts that are kept, and for pictures."""
    return PAINTERS[read_index(folder).class_name](pipe, TensorCache(cache_bytes), TensorCache(cache_bytes), Defaults.of(folder, chosen))


def picture(seed: int, height: int, width: int, *, opaque: bool = True) -> Pixels:
    """[height, width, 4]."""
    made = np.random.default_rng(seed).integers(0, 256, (height, width, 4), dtype=np.uint8)
    if opaque:
        made[..., 3] = 255
    return made


def apart(made: torch.Tensor, reference: torch.Tensor) -> float:
    assert made.shape == reference.shape
    return float((made - reference).abs().max() / reference.abs().max())


def levels_apart(images: Sequence[Image.Image], others: Sequence[Image.Image]) -> int:
    assert [image.mode for image in images] == [other.mode for other in others]
    pairs = zip(images, others, strict=True)
    return max(int(np.abs(np.asarray(one, dtype=int) - np.asarray(other, dtype=int)).max()) for one, other in pairs)


@contextmanager
def _last_latents(pipe: Any) -> Iterator[Callable[[], torch.Tensor]]:
    """The latents that the scheduler of a pipeline made last: two of the schedulers show them in no other way."""
    scheduler, made = pipe.scheduler, list[torch.Tensor]()
    step = scheduler.step

    def seen(*arguments: Any, **named: Any) -> Any:
        result = step(*arguments, **named)
        made.append(result[0])
        return result

    scheduler.step = seen
    try:
        yield lambda: made[-1]
    finally:
        del scheduler.step


@contextmanager
def _smaller(name: str) -> Iterator[None]:
    """Pictures that are edited are resized to SMALL_AREA."""
    if name not in _SIZES:
        yield
        return
    module: Any = import_module(f"diffusers.pipelines.{_SIZES[name]}")
    published = module.calculate_dimensions
    module.calculate_dimensions = lambda area, ratio: published(area * SMALL_AREA / AREA, ratio)
    try:
        yield
    finally:
        module.calculate_dimensions = published
