"""Models that draw, of small checkpoints, and what came of their drawings."""

from __future__ import annotations

import io
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from helpers.painting import SMALL_AREA, Pixels, pipeline_of
from omnistage.models import registry
from omnistage.models.conversation import Media
from omnistage.models.diffusers.model import DrawingJob, DrawnModel, StepDrawing
from omnistage.models.diffusers.plan import DrawingPlan
from omnistage.models.interface import (
    BadRequest,
    Drawn,
    DrawRequest,
    EncodedPicture,
    Note,
    Preview,
    StepsDone,
    TensorRows,
    Wanted,
    inputs_of,
)
from omnistage.models.options import LoadOptions

USUAL = {"width": 64, "height": 64, "steps": 4}
EDITING = {"steps": 3, "condition_area": SMALL_AREA}


@dataclass
class PiecesOfDrawing:
    """All pieces of one drawing, in order."""

    pieces: list[Drawn] = field(default_factory=list)

    @property
    def steps(self) -> list[int]:
        return [piece.step for piece in self.pieces if isinstance(piece, StepsDone)]

    @property
    def previews(self) -> list[Preview]:
        return [piece for piece in self.pieces if isinstance(piece, Preview)]

    @property
    def pictures(self) -> list[EncodedPicture]:
        return [piece for piece in self.pieces if isinstance(piece, EncodedPicture)]

    @property
    def notes(self) -> list[str]:
        return [piece.text for piece in self.pieces if isinstance(piece, Note)]

    def rows(self, port: str) -> NDArray[np.generic]:
        """All rows of a tensor port."""
        return np.concatenate([piece.rows for piece in self.pieces if isinstance(piece, TensorRows) and piece.port == port])

    @property
    def pixels(self) -> NDArray[np.int64]:
        """[pictures, height, width, samples]."""
        return np.stack([pixels_of(picture.data) for picture in self.pictures])


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def saved(image: Image.Image | Pixels) -> bytes:
    """As PNG."""
    file = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(file, "PNG", compress_level=1)
    return file.getvalue()


def pixels_of(data: bytes) -> NDArray[np.int64]:
    return np.asarray(opened(data), dtype=np.int64)


@asynccontextmanager
async def model_of(folder: Path, *, threads: int = 1, max_batch_size: int = 0, **options: Any) -> AsyncIterator[DrawnModel[Any]]:
    """In float32. options: of the family."""
    chosen = LoadOptions(folder, dtype="float32", threads=threads, max_batch_size=max_batch_size, family=options)
    model = registry.load("diffusers", "diffusion", chosen)
    assert isinstance(model, DrawnModel)
    try:
        yield model
    finally:
        await model.close()


async def draw(
    model: DrawnModel[Any],
    prompt: str,
    *,
    images: tuple[bytes, ...] = (),
    backgrounds: tuple[tuple[int, int, int] | None, ...] = (),
    first: int = 0,
    until: int = 1 << 30,
    ports: Mapping[str, int] | None = None,
    **asked: Any,
) -> PiecesOfDrawing:
    """first: picture from which on it is wanted. until: step after which the reader goes away. ports: that are wanted instead, and from
    which item on. images: PNG. backgrounds: that they lie on."""
    media = (Media("image/png", image, background=ground) for image, ground in zip_longest(images, backgrounds))
    request = replace(DrawRequest(seed=0, prompt=prompt, images=tuple(media)), **asked)
    drawing = PiecesOfDrawing()
    prepared = await model.prepare(request)
    async with aclosing(model.draw(prepared, inputs_of(), ports or {"image": first, "progress": 0})) as pieces:
        async for piece in pieces:
            drawing.pieces.append(piece)
            if isinstance(piece, StepsDone) and piece.step >= until:
                break
    return drawing


@contextmanager
def jobs_of(model: DrawnModel[Any]) -> Iterator[list[weakref.ref[DrawingJob]]]:
    """The jobs that a model makes of drawings, which are not kept by this."""
    artist, jobs = model._artist, list[weakref.ref[DrawingJob]]()
    assert isinstance(artist, StepDrawing)

    def seen(plan: DrawingPlan, wanted: Wanted) -> DrawingJob:
        job = StepDrawing.job(artist, plan, wanted)
        jobs.append(weakref.ref(job))
        return job

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(artist, "job", seen)
        yield jobs


async def check_refused(model: DrawnModel[Any], field: str, told: str | None = None, prompt: str = "a dog", **asked: Any) -> str:
    """The drawing is refused, by this field of its request; returns the description. asked: as of draw."""
    with pytest.raises(BadRequest, match=told) as refused:
        await draw(model, prompt, **asked)
    assert refused.value.field == f"diffusion.{field}"
    return refused.value.description


def published(folder: Path, seed: int, **options: Any) -> NDArray[Any]:
    """The picture that the pipeline of Diffusers itself draws: [height, width, samples]. options: of its call."""
    options = {"prompt": "a dog", **options}
    return np.asarray(pipeline_of(folder)(generator=torch.Generator().manual_seed(seed), **options).images[0])
