"""Pictures as the product of a drawing: their ports, their previews, and the way from latents to rows, and to files that contain the
parameters that they were drawn from.

**Previews** are pictures of an unfinished drawing, made without the VAE. A preview shows the estimate x0 = x - sigma v of the picture
without its noise, not the noisy latents, which stay noise through any map until the last steps. Each place of the latents becomes one
pixel by a linear map, which is fitted to the pictures that were served: latents in, mean colours of the pixels under them out. Until
there is one picture the VAE decodes the estimate, which costs as much as a picture."""

from __future__ import annotations

import io
import json
import math
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from PIL import Image as pillow
from PIL import ImageChops, ImageFilter, PngImagePlugin
from PIL.Image import Image, Resampling
from torch import Tensor

from omnistage.models.diffusers.painter import Canvas, Painter
from omnistage.models.diffusers.plan import JPEG, MEDIA_TYPES, PNG, WEBP, DrawingPlan
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
        return {IMAGE: count, LATENTS: count * self._painter.grid_places(plan), PIXELS: count * math.prod(plan.size)}

    def first(self, plan: DrawingPlan, ports: Wanted) -> int:
        """The number of the first result that must be drawn: the client has the earlier results."""
        # Each result gives equally many items at a port, and `ports` has the first item that is wanted there.
        item_counts = self.items(plan)
        return min((ports[port] * plan.results // count for port, count in item_counts.items() if port in ports), default=0)

    def preview(self, canvas: Canvas) -> Sequence[Preview]:
        """The preview of the last step, if one is due."""
        plan, sampler = canvas.plan, canvas.sampler
        if not is_due(sampler.step, sampler.steps, plan.previews):
            return []
        assert canvas.estimate is not None
        grid = self._painter.preview_grid(canvas.estimate, plan)
        image = self._previews.show(grid[0]) if self._previews.is_fitted else next(self._painter.images(grid))
        image = resize_preview(image, plan)
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
        # By port, the first wanted layer of this result: `ports` has the first wanted item among those of all pictures.
        first_layers = {port: ports[port] * plan.pictures // counts[port] - number * layers for port in (IMAGE, PIXELS) if port in ports}
        first = max(min(first_layers.values(), default=layers), 0)
        if first >= layers:
            return
        parameter_text = parameters(plan, number, self._model, canvas.residuals[0].reused, canvas.residuals[0].largest)
        for layer, (grid, image) in enumerate(zip(grids[first:], self._painter.images(grids[first:]), strict=True), first):
            self._previews.fit(grid, image)
            if layers == 1 and _is_blank(image):
                yield Note(BLANK)
            image = in_final_size(image, plan)
            if IMAGE in first_layers and layer >= first_layers[IMAGE]:
                yield EncodedPicture(encode_picture(image, plan.picture_type, parameter_text), plan.picture_type, layer)
            yield from self._rows(plan, ports, PIXELS, plan.pictures, number * layers + layer, partial(_pixels, image))

    def _rows(
        self, plan: DrawingPlan, ports: Wanted, port: str, parts: int, place: int, make_rows: Callable[[], Array]
    ) -> Generator[TensorRows, None, None]:
        """Yields the rows of one part of the plan on a tensor port, from the first wanted row on; nothing if the port is not wanted. parts:
        number of all parts. place: number of this part."""
        count = self.items(plan)[port] // parts
        skipped = max(ports[port] - place * count, 0) if port in ports else count
        if skipped < count:
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


RIDGE = 1e-3
"""Added to the squares, because a map cannot be fitted to the latents of one flat picture alone."""
EARLIER_WEIGHT = 0.9
"""The weight of all earlier pictures, compared with the newest picture."""
PREVIEW_SIDE = 256
"""Pixels of the longer side of a preview if none is asked for; never more than the picture's."""


class LinearMap:
    """A linear map from latents to colours, by least squares over the pictures that were drawn."""

    def __init__(self) -> None:
        self._squares: Tensor | None = None
        self._products: Tensor | None = None
        self._map: Tensor | None = None

    @property
    def is_fitted(self) -> bool:
        return self._map is not None

    def fit(self, grid: Tensor, image: Image) -> None:
        """Learn from a grid of latents, [channels, height, width], and the picture that the VAE made of it."""
        channels, height, width = grid.shape
        small = image.resize((width, height), pillow.Resampling.BOX)
        colours = torch.from_numpy(np.asarray(small, dtype=np.float64).reshape(height * width, -1) / 255)
        rows = _with_one(grid)
        squares, products = rows.T @ rows / len(rows), rows.T @ colours / len(rows)
        if self._squares is not None and self._products is not None and self._products.shape == products.shape:
            squares, products = EARLIER_WEIGHT * self._squares + squares, EARLIER_WEIGHT * self._products + products
        self._squares, self._products = squares, products
        self._map = torch.linalg.solve(squares + RIDGE * torch.eye(channels + 1, dtype=torch.float64), products)

    def show(self, grid: Tensor) -> Image:
        """The preview of a grid of latents, [channels, height, width], with one pixel for each place."""
        assert self._map is not None
        _, height, width = grid.shape
        colours = (_with_one(grid) @ self._map).clamp(0, 1).mul(255).round().to(torch.uint8)
        return pillow.fromarray(colours.reshape(height, width, -1).numpy())


def _with_one(grid: Tensor) -> Tensor:
    """The latents as rows with a 1 at the end, so that the map can add a constant: [places, channels + 1] in float64."""
    places = grid.flatten(1).T.double().cpu()
    return torch.cat([places, torch.ones(len(places), 1, dtype=torch.float64)], dim=1)


def resize_preview(image: Image, plan: DrawingPlan) -> Image:
    """The preview in the shape of the picture, its longer side as the plan says, or PREVIEW_SIDE, but no longer than the picture's own."""
    longest = min(plan.preview_side or PREVIEW_SIDE, max(plan.size))
    width, height = (max(round(side * longest / max(plan.size)), 1) for side in plan.size)
    return fitted(image, width, height) if plan.final_size else image.resize((width, height), Resampling.BICUBIC)


def in_final_size(image: Image, plan: DrawingPlan) -> Image:
    """A drawn picture in the size in which it is wanted."""
    return fitted(image, *plan.final_size) if plan.final_size else image


def fitted(image: Image, width: int, height: int) -> Image:
    """The whole picture, undistorted, in another size. If that has another shape, what remains on two sides has the colour of the picture's
    edge, so a plain background goes on. Enlarged edges are clean: no value leaves the range of the pixels around it (Lanczos alone would
    draw a bright line beside a dark one)."""
    scale = min(width / image.width, height / image.height)
    size = max(round(image.width * scale), 1), max(round(image.height * scale), 1)
    resized = image.resize(size, Resampling.LANCZOS)
    if scale > 1:
        low, high = (image.filter(rank(3)).resize(size, Resampling.BILINEAR) for rank in (ImageFilter.MinFilter, ImageFilter.MaxFilter))
        resized = ImageChops.darker(ImageChops.lighter(resized, low), high)
    if size == (width, height):
        return resized
    pixels = np.asarray(image).reshape(image.height, image.width, -1)
    edge = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    ground = pillow.new(image.mode, (width, height), tuple(map(int, np.median(edge, axis=0))))
    ground.paste(resized, ((width - size[0]) // 2, (height - size[1]) // 2))
    return ground


def size_note(plan: DrawingPlan) -> str:
    """The note on a picture that comes out in another size than that in which it is drawn; empty for others."""
    if plan.final_size is None:
        return ""
    (width, height), (final_width, final_height) = (plan.width, plan.height), plan.final_size
    change = "enlarged" if final_width * final_height > width * height else "reduced"
    filling = "" if final_width * height == final_height * width else ", with more background on two sides"
    return f"drawn at {width}x{height}, the size of this model, and {change} to {final_width}x{final_height}{filling}"


def is_due(step: int, steps: int, previews: int) -> bool:
    """Whether a preview is shown after this step. previews: their number. Each comes in the middle of its share of the steps before the
    last; the last step shows none, as the picture itself follows."""
    max_step = steps - 1
    if step > max_step:
        return False
    shown = min(previews, max_step)
    # The previews due after a number of steps are that number * shown / max_step, rounded.
    due_before, due = ((2 * count * shown + max_step) // (2 * max_step) for count in (step - 1, step))
    return due > due_before


PARAMETERS_KEY = "parameters"
"""The keyword of a PNG's text chunk, under which people look for the parameters."""
DESCRIPTION = 0x010E
"""EXIF's ImageDescription, for the formats that have no such chunk."""
MAX_EXIF_BYTES = 60_000
"""The limit of bytes of the parameters in EXIF, all of them ASCII."""
SHORT_PROMPT = 2000
"""Characters that stay of a prompt that is too long: at most 12 bytes each."""
QUALITY = 92
FASTER = 4
"""zlib's level: at 6 a PNG takes twice as long and is hardly smaller."""


def parameters(plan: DrawingPlan, number: int, model: str, reused: int = 0, largest: float = 0.0) -> str:
    """The parameters of the picture with that number, as JSON: with them, and the pictures that it was drawn from, the same model draws it
    again. In the JSON, images are SHA-256 of files, and backgrounds are colours, empty for the usual. reused, largest: see Residuals."""
    backgrounds = [f"#{bytes(source.background).hex()}" if source.background else "" for source in plan.sources]
    fields = {
        "prompt": plan.prompt,
        "negative_prompt": plan.negative,
        "width": plan.size[0],
        "height": plan.size[1],
        "steps": plan.steps,
        "guidance_scale": plan.guidance,
        "seed": plan.seed_of(number),
        "layers": plan.layers,
        "images": [source.digest.hex() for source in plan.sources],
        "backgrounds": backgrounds if any(backgrounds) else [],
        "step_cache": plan.step_cache,
        "sigmas": plan.sigmas,
        "strength": plan.strength,
        "mask_image": plan.mask and plan.mask.digest.hex(),
        "control_image": plan.control and plan.control.digest.hex(),
        "options": dict(plan.own_options),
        "steps_reused": reused,
        "largest_change_reused": round(largest, 4),
        "model": model,
    }
    return json.dumps(
        # Parameters without effect are left out. A seed or scale of 0 has an effect.
        {key: value for key, value in fields.items() if value not in (None, 0, [], (), {}) or key in ("seed", "guidance_scale")}
    )


def encode_picture(image: Image, media_type: str, parameter_text: str = "") -> bytes:
    """The bytes of a picture's file. JPEG has no transparency: transparent pixels become white. parameter_text: see `parameters`."""
    file = io.BytesIO()
    if media_type == PNG:
        text = PngImagePlugin.PngInfo()
        if parameter_text:
            text.add_itxt(PARAMETERS_KEY, parameter_text)
        image.save(file, "PNG", pnginfo=text, compress_level=FASTER)
        return file.getvalue()
    exif = pillow.Exif()
    if parameter_text:
        exif[DESCRIPTION] = _short(parameter_text)
    if media_type == JPEG:
        _opaque(image).save(file, "JPEG", quality=QUALITY, exif=exif)
    elif media_type == WEBP:
        image.save(file, "WEBP", quality=QUALITY, exif=exif)
    else:
        raise ValueError(f"no pictures of type {media_type!r}")
    return file.getvalue()


def _short(parameter_text: str) -> str:
    """The parameters (JSON), with the prompts cut short if the text would not fit into EXIF, which has 64 KiB."""
    if len(parameter_text) <= MAX_EXIF_BYTES:
        return parameter_text
    values = json.loads(parameter_text)
    words = {key: f"{values[key][:SHORT_PROMPT]}..." for key in ("prompt", "negative_prompt") if len(values.get(key, "")) > SHORT_PROMPT}
    return json.dumps({**values, **words})


def _opaque(image: Image) -> Image:
    """The picture in RGB, on white where it is transparent."""
    if image.mode != "RGBA":
        return image.convert("RGB")
    white = pillow.new("RGB", image.size, "white")
    white.paste(image, mask=image.getchannel("A"))
    return white
