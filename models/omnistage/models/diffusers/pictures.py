"""Pictures as the product of a drawing: their ports, previews, and the way from latents to files and rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from PIL.Image import Image, Resampling
from torch import Tensor

from omnistage.models.diffusers.output import encode_picture, parameters
from omnistage.models.diffusers.painter import Canvas, Painter
from omnistage.models.diffusers.plan import MEDIA_TYPES, DrawingPlan
from omnistage.models.diffusers.previews import LinearMap, is_due, resize_preview
from omnistage.models.interface import (
    Array,
    BadRequest,
    Content,
    Drawn,
    DrawRequest,
    ElementType,
    EncodedPicture,
    Failed,
    Note,
    PortSpec,
    Preview,
    TensorRows,
    Wanted,
)

IMAGE, LATENTS, PIXELS = "image", "latents", "pixels"

BLANK = "a picture has one colour all over: try other words, another seed or size"
BLANK_SIDE, BLANK_LEVELS = 16, 24
"""A picture is blank if, resized to squares of BLANK_SIDE pixels, the levels of each colour differ by at most BLANK_LEVELS."""


def check_kind(request: DrawRequest, name: str) -> None:
    """Raises BadRequest for a request for another product than pictures. name: the model's name."""
    if request.frames:
        raise BadRequest("diffusion.frames", f"{name} draws pictures, no films: leave it out")
    if request.seconds:
        raise BadRequest("diffusion.duration_s", f"{name} draws pictures and makes no sound: leave it out")
    if request.media_type not in ("", *MEDIA_TYPES):
        raise BadRequest("diffusion.media_type", f"{name} makes {', '.join(MEDIA_TYPES)}: ask for one of these or leave it out")


class PicturePainter(Painter):
    """The loop of pictures. `samples`, `values` and `grid_places` run on any thread, everything else on the thread of the model."""

    followed: ClassVar[frozenset[str]] = frozenset(
        (
            *("transformer.in_channels", "vae.latents_mean", "vae.latents_std", "vae.scaling_factor", "vae.shift_factor", "vae.z_dim"),
            *("vae.block_out_channels", "vae.latent_channels"),
        )
    )

    @property
    def samples(self) -> int:
        """The number of samples of a pixel: 3, or 4 with opacity."""
        return 4 if self.pipe.vae.config.get("input_channels") == 4 else 3

    def frames(self, plan: DrawingPlan) -> int:
        """The number of grids that are drawn together for one picture."""
        return 1

    def values(self, plan: DrawingPlan) -> int:
        return self.channels * self.grid_places(plan) * self.frames(plan)

    def grid_places(self, plan: DrawingPlan) -> int:
        """The number of places in the latents of one picture or layer."""
        side = self.pipe.vae_scale_factor
        return int(plan.height // side * (plan.width // side))

    def preview_grid(self, latents: Tensor, plan: DrawingPlan) -> Tensor:
        """The grid of the one picture that a preview shows: [1, channels, height, width]."""
        return self.grids(latents, plan)[:1]

    @abstractmethod
    def grids(self, latents: Tensor, plan: DrawingPlan) -> Tensor:
        """[layers or 1, channels, height, width]: latents in the layout of the VAE, before its mean and scale are applied."""

    def images(self, grids: Tensor) -> Iterator[Image]:
        """Yields the pictures that the VAE makes of [n, channels, height, width], one after the other. Raises Failed for values that are no
        numbers: the picture would be flat, and pass for a picture."""
        for grid in torch.split(grids, 1):
            decoded = self.decoded(grid)
            if not torch.isfinite(decoded).all():
                raise Failed("the VAE makes no number of the picture: with these weights it cannot be drawn")
            yield self.pipe.image_processor.postprocess(decoded, output_type="pil")[0]

    @abstractmethod
    def decoded(self, grid: Tensor) -> Tensor:
        """The picture that the VAE makes of one grid, [1, channels, height, width]: [1, samples, height, width], -1 to 1."""

    def product(self, model: str) -> Pictures:
        return Pictures(self, model)


class Pictures:
    """The product of picture models, a `CanvasProduct`. model: the model's name, which pictures state in their files."""

    def __init__(self, painter: PicturePainter, model: str) -> None:
        self._painter, self._model = painter, model
        self._previews = LinearMap()

    @property
    def ports(self) -> tuple[PortSpec, ...]:
        """Rows of latents are places of the VAE's grid, row by row from the top, one layer after the other; rows of pixels are pixels."""
        return (
            PortSpec(IMAGE, Content.IMAGE),
            PortSpec(LATENTS, Content.TENSOR, width=self._painter.channels, element_type=ElementType.FLOAT32),
            PortSpec(PIXELS, Content.TENSOR, width=self._painter.samples, element_type=ElementType.UINT8),
        )

    def check(self, request: DrawRequest) -> None:
        check_kind(request, self._model)

    def items(self, plan: DrawingPlan) -> Mapping[str, int]:
        count = plan.pictures
        return {IMAGE: count, LATENTS: count * self._painter.grid_places(plan), PIXELS: count * plan.height * plan.width}

    def first(self, plan: DrawingPlan, ports: Wanted) -> int:
        """The number of the first result that must be drawn: the client has the earlier results."""
        counts = self.items(plan)
        return min((ports[port] * plan.results // count for port, count in counts.items() if port in ports), default=0)

    def preview(self, canvas: Canvas) -> Sequence[Preview]:
        """The preview of the last step, if one is due."""
        plan, sampler = canvas.plan, canvas.sampler
        if not is_due(sampler.step, sampler.steps, plan.previews):
            return []
        assert canvas.estimate is not None
        grid = self._painter.preview_grid(canvas.estimate, plan)
        image = self._previews.show(grid[0]) if self._previews.is_fitted else next(self._painter.images(grid))
        image = resize_preview(image, plan.preview_side, plan.width, plan.height)
        return [Preview(encode_picture(image, plan.picture_type), plan.picture_type, sampler.step)]

    def decode(self, plan: DrawingPlan, latents: Sequence[Canvas], ports: Wanted) -> Generator[Drawn, None, None]:
        """Yields the latents, files and pixels of each result that is drawn, from the wanted items on."""
        for number, canvas in enumerate(latents, plan.results - len(latents)):
            grids = self._painter.grids(canvas.latents, plan)
            yield from self._rows(plan, ports, LATENTS, plan.results, number, partial(_places, grids))
            yield from self._pictures(plan, ports, number, canvas, grids)

    def _pictures(self, plan: DrawingPlan, ports: Wanted, number: int, canvas: Canvas, grids: Tensor) -> Generator[Drawn, None, None]:
        """Yields the wanted layers of a result as files, with their pixels. number: the result's number. grids: its layers."""
        layers, counts = len(grids), self.items(plan)
        first_layers = {port: ports[port] * plan.pictures // counts[port] - number * layers for port in (IMAGE, PIXELS) if port in ports}
        first = max(min(first_layers.values(), default=layers), 0)
        if first >= layers:
            return
        parameter_text = parameters(plan, number, self._model, canvas.residuals[0].reused, canvas.residuals[0].largest)
        for layer, (grid, image) in enumerate(zip(grids[first:], self._painter.images(grids[first:]), strict=True), first):
            self._previews.fit(grid, image)
            if layers == 1 and _is_blank(image):
                yield Note(BLANK)
            if IMAGE in first_layers and layer >= first_layers[IMAGE]:
                yield EncodedPicture(encode_picture(image, plan.picture_type, parameter_text), plan.picture_type, layer)
            yield from self._rows(plan, ports, PIXELS, plan.pictures, number * layers + layer, partial(_pixels, image))

    def _rows(
        self, plan: DrawingPlan, ports: Wanted, port: str, parts: int, place: int, make_rows: Callable[[], Array]
    ) -> Generator[TensorRows, None, None]:
        """Yields the rows of one part of the plan on a tensor port, from the first wanted row on; nothing if the port is not wanted. parts:
        number of all parts. place: number of this part."""
        count = self.items(plan)[port] // parts
        if port in ports and (skipped := max(ports[port] - place * count, 0)) < count:
            yield TensorRows(port, make_rows()[skipped:])


def _is_blank(image: Image) -> bool:
    """Whether a picture has nearly one colour all over."""
    small = np.asarray(image.resize((BLANK_SIDE, BLANK_SIDE), Resampling.BOX), np.int16).reshape(BLANK_SIDE**2, -1)
    return bool((small.max(0) - small.min(0)).max() <= BLANK_LEVELS)


def _places(grids: Tensor) -> Array:
    """The latents as rows, one for each place: [layers * height * width, channels], float32."""
    places: Array = grids.permute(0, 2, 3, 1).reshape(-1, grids.shape[1]).float().cpu().numpy()
    return places


def _pixels(image: Image) -> Array:
    """The pixels as rows: [height * width, samples], uint8."""
    pixels = np.asarray(image)
    return pixels.reshape(-1, pixels.shape[-1])
