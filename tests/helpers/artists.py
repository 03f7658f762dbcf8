"""Models that draw, of small checkpoints, and what came of their drawings."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from helpers.painting import SMALL_AREA
from omnistage.models import registry
from omnistage.models.conversation import Media
from omnistage.models.diffusers.model import DrawnModel
from omnistage.models.interface import Drawn, DrawRequest, EncodedPicture, Note, Preview, StepsDone, TensorRows, no_inputs
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


def saved(image: Image.Image) -> bytes:
    """As PNG."""
    file = io.BytesIO()
    image.save(file, "PNG")
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
    async with aclosing(model.draw(prepared, no_inputs(), ports or {"image": first, "progress": 0})) as pieces:
        async for piece in pieces:
            drawing.pieces.append(piece)
            if isinstance(piece, StepsDone) and piece.step >= until:
                break
    return drawing
