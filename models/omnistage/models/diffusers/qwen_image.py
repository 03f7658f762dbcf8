"""Qwen-Image: pictures from words; from words and one picture (Edit) or several (EditPlus); a picture taken apart into layers (Layered)."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_dimensions
from numpy.typing import NDArray
from torch import Tensor

from omnistage.models.diffusers.options import AREA
from omnistage.models.diffusers.own_options import Range
from omnistage.models.diffusers.painter import TOKEN_LIMIT, BatchRow, Canvas, Conditions, Painter, linear_shift, pad_texts, with_images
from omnistage.models.diffusers.pictures import PicturePainter
from omnistage.models.diffusers.plan import DrawingLimits, DrawingPlan, in_shape
from omnistage.models.diffusers.sampling import StepCache, min_steps

MAX_TOKENS = 1024
"""The limit of tokens of a prompt, without its template. A drawing may get less, see DrawingLimits.prompt_tokens."""
SEEN_AREA = 384 * 384
"""Pixels of a picture that EditPlus shows its text encoder; its transformer gets AREA pixels."""
MAX_IMAGES = 8
LAYERS, MAX_LAYERS = 4, 16
SIDES = (640, 1024)
"""Layered was trained for pictures of as many pixels as squares of these sides have."""
LAYERED_SHIFT_TOKENS = 256


class QwenImagePainter(PicturePainter):
    """Draws from words alone; the base of the other three."""

    follows: ClassVar[Mapping[str, Range]] = {TOKEN_LIMIT: (1, MAX_TOKENS)}

    def _own_limits(self) -> DrawingLimits:
        """The limits of the pipeline, with the defaults of the published model."""
        return DrawingLimits(
            multiple=self.pipe.vae_scale_factor * 2,
            width=1024,
            height=1024,
            steps=50,
            guidance=4.0,
            negative=" ",
            min_steps=min_steps(self.pipe.scheduler),
            prompt_tokens=self._default(TOKEN_LIMIT),
        )

    def text_tokens(self, text: str) -> tuple[int, int]:
        return len(self.counting(text)["input_ids"]), MAX_TOKENS

    def _shape(self, width: int, height: int) -> tuple[int, int, int]:
        """The shape of a picture of these pixels in tokens: frames, height and width."""
        side = self.pipe.vae_scale_factor * 2
        return 1, height // side, width // side

    def _shapes(self, plan: DrawingPlan) -> tuple[tuple[int, int, int], ...]:
        """The shapes of the result (each layer of it) and of each edited picture, see `_shape`."""
        return (self._shape(plan.width, plan.height),)

    def tokens(self, plan: DrawingPlan) -> int:
        return sum(frames * height * width for frames, height, width in self._shapes(plan))

    # 2: preprocess

    def _conditions(self, plan: DrawingPlan) -> Conditions:
        return Conditions(*self.texts(plan), self._image_latents(plan), self._shapes(plan))

    def text(self, plan: DrawingPlan, text: str) -> Tensor:
        return self._encoded(text, plan)

    def _encoded(self, text: str, plan: DrawingPlan, **pictures: Any) -> Tensor:
        """The rows of the text encoder for a text, [tokens, width]. pictures: those that it sees too; then no text is cut. Without the
        argument TOKEN_LIMIT `encode_prompt` would read twice as many words as the pipeline does."""
        cut_option = {} if pictures else {TOKEN_LIMIT: self.words_drawn(plan)}
        rows: Tensor = self.pipe.encode_prompt(text, **cut_option, **pictures)[0][0]
        return rows

    def _image_latents(self, plan: DrawingPlan) -> Tensor | None:
        """The latents of the edited pictures, [tokens, channels]; None if no picture is edited."""
        return None

    def noise(self, plan: DrawingPlan, conditions: Conditions, generator: torch.Generator) -> Tensor:
        """The noise that a picture begins with, packed: [1, tokens, 4 * channels]."""
        _, height, width = conditions.shapes[0]
        shape = (1, 1, self.channels, 2 * height, 2 * width)
        return self._packed(torch.randn(shape, generator=generator, dtype=conditions.positive.dtype).to(self.device))

    def _packed(self, frames: Tensor) -> Tensor:
        """The latents [1, 1, channels, height, width] as [1, tokens, 4 channels]."""
        packed: Tensor = self.pipe._pack_latents(frames, 1, *frames.shape[2:])
        return packed

    def sigmas(self, steps: int) -> NDArray[np.float64]:
        return np.linspace(1.0, 1 / steps, steps)

    def shift(self, plan: DrawingPlan) -> float:
        return linear_shift(self.pipe.scheduler, math.prod(self._shape(plan.width, plan.height)))

    # 3: execute

    def group(self, canvas: Canvas) -> Hashable:
        return canvas.conditions.shapes

    def own_step_cache(self) -> StepCache:
        return StepCache(self.pipe.transformer.transformer_blocks, ("encoder_hidden_states_mask", "temb", "modulate_index"))

    def velocities(self, rows: Sequence[BatchRow]) -> list[Tensor]:
        """Words are padded and masked; pictures of a group are equally long."""
        texts, mask = pad_texts([row.text for row in rows])
        output: Tensor = self.pipe.transformer(
            hidden_states=torch.cat([with_images(row) for row in rows]),
            timestep=torch.stack([row.canvas.sampler.timestep for row in rows]).to(rows[0].canvas.latents.dtype) / 1000,
            encoder_hidden_states=texts,
            encoder_hidden_states_mask=mask,
            img_shapes=[list(row.canvas.conditions.shapes) for row in rows],
            return_dict=False,
            **self._extra_arguments(len(rows)),
        )[0]
        return list(torch.split(output[:, : rows[0].canvas.latents.shape[1]], 1))

    def _extra_arguments(self, count: int) -> dict[str, Tensor]:
        """Further arguments of the transformer, for `count` rows."""
        return {}

    def guided(self, positive: Tensor, negative: Tensor, canvas: Canvas) -> Tensor:
        """The velocity after guidance, scaled to the length of the velocity of the prompt alone."""
        velocity = negative + canvas.plan.guidance * (positive - negative)
        prompt_norm, guided_norm = (torch.linalg.vector_norm(each, dim=-1, keepdim=True) for each in (positive, velocity))
        scaled: Tensor = velocity * (prompt_norm / guided_norm)
        return scaled

    # 4: postprocess

    @property
    def channels(self) -> int:
        return int(self.pipe.transformer.config.in_channels) // 4

    def grids(self, latents: Tensor, plan: DrawingPlan) -> Tensor:
        unpacked: Tensor = self.pipe._unpack_latents(latents, plan.height, plan.width, self.pipe.vae_scale_factor)
        return unpacked[:, :, 0]

    def decoded(self, grid: Tensor) -> Tensor:
        """The picture that the VAE makes of a grid: [1, samples, height, width], -1 to 1."""
        vae = self.pipe.vae
        mean, deviation = (torch.tensor(each).view(1, -1, 1, 1, 1) for each in (vae.config.latents_mean, vae.config.latents_std))
        mean, inverse = mean.to(self.device, vae.dtype), 1.0 / deviation.to(self.device, vae.dtype)
        picture: Tensor = vae.decode(grid.to(vae.dtype)[:, :, None] / inverse + mean, return_dict=False)[0]
        return picture[:, :, 0]


class _FromPictures(QwenImagePainter):
    """Draws from words and pictures: the latents of the pictures come after the latents of the result."""

    def _sizes(self, plan: DrawingPlan) -> list[tuple[int, int]]:
        """The width and height of each picture for the VAE."""
        return [image.resized[0].size for image in plan.images]

    def _fits(self, plan: DrawingPlan, ratio: float) -> list[tuple[int, int]]:
        width, height = calculate_dimensions(self._area, ratio)
        return [(int(width), int(height))]

    def _shapes(self, plan: DrawingPlan) -> tuple[tuple[int, int, int], ...]:
        return (*super()._shapes(plan), *(self._shape(*size) for size in self._sizes(plan)))

    def _image_latents(self, plan: DrawingPlan) -> Tensor:
        pairs = enumerate(zip(plan.sources, self._sizes(plan), strict=True))
        return torch.cat([self._pictures.get((source, size), partial(self._latents, plan, index, size)) for index, (source, size) in pairs])

    def _latents(self, plan: DrawingPlan, number: int, size: tuple[int, int]) -> Tensor:
        """The latents of the picture with that number, packed: [tokens, channels]. size: width and height for the VAE."""
        width, height = size
        image = plan.images[number].resized[0]
        pixels = self.pipe.image_processor.preprocess(image, height, width).unsqueeze(2).to(self.device, self.dtype)
        latents = self.pipe._encode_vae_image(image=pixels, generator=None)
        return self._packed(latents.transpose(1, 2))[0]


class QwenImageEditPainter(_FromPictures):
    """Edits one picture. The result has its shape and about AREA pixels if no other size is asked for."""

    follows: ClassVar[Mapping[str, Range]] = {}

    def _own_limits(self) -> DrawingLimits:
        """The limits of the pipeline, which cuts no prompt that comes with a picture."""
        return replace(super()._own_limits(), width=0, height=0, images=(1, 1), prompt_tokens=0)

    def sized(self, plan: DrawingPlan) -> DrawingPlan:
        """The plan with the size of the last picture where none is asked for, rounded down to multiples."""
        plan = in_shape(plan, self.limits.multiple)
        width, height = self._sizes(plan)[-1]
        side = self.limits.multiple
        return replace(plan, width=(plan.width or width) // side * side, height=(plan.height or height) // side * side)

    def text(self, plan: DrawingPlan, text: str) -> Tensor:
        """The text encoder gets the same pixels as the VAE."""
        return self._encoded(text, plan, image=plan.images[0].resized[0])


class QwenImageEditPlusPainter(QwenImageEditPainter):
    """Edits several pictures; the result has the shape of the last one."""

    def _own_limits(self) -> DrawingLimits:
        return replace(super()._own_limits(), images=(1, MAX_IMAGES))

    def text(self, plan: DrawingPlan, text: str) -> Tensor:
        return self._encoded(text, plan, image=[image.resized[1] for image in plan.images])

    def _fits(self, plan: DrawingPlan, ratio: float) -> list[tuple[int, int]]:
        """The sizes of a picture for the VAE and, smaller, for the text encoder. ratio: its width divided by its height."""
        width, height = calculate_dimensions(self._area * SEEN_AREA // AREA, ratio)
        return [*super()._fits(plan, ratio), (int(width), int(height))]


class QwenImageLayeredPainter(_FromPictures):
    """Takes a picture apart into layers with transparency. The latents have one frame more: the whole picture, which comes first."""

    follows: ClassVar[Mapping[str, Range]] = {TOKEN_LIMIT: (1, MAX_TOKENS), "cfg_normalize": (0, 1)}

    def _own_limits(self) -> DrawingLimits:
        return replace(super()._own_limits(), width=0, height=0, images=(1, 1), layers=LAYERS, max_layers=MAX_LAYERS, sides=self._sides())

    def _sides(self) -> tuple[int, ...]:
        """The sides that may be asked for, in pixels, in proportion to the area that was chosen."""
        share = (self._area / AREA) ** 0.5
        return tuple(round(side * share) for side in SIDES)

    def sized(self, plan: DrawingPlan) -> DrawingPlan:
        """The plan in the size of its picture, each side rounded down to a multiple."""
        side = self.limits.multiple
        width, height = self._sizes(plan)[0]
        return replace(plan, width=width // side * side, height=height // side * side)

    def _fits(self, plan: DrawingPlan, ratio: float) -> list[tuple[int, int]]:
        """The width and height in that ratio, with as many pixels as a square of the side that is asked for."""
        side = plan.width if plan.width in self.limits.sides and plan.width == plan.height else 0
        width, height = calculate_dimensions((side or self.limits.sides[0]) ** 2, ratio)
        return [(int(width), int(height))]

    def _shapes(self, plan: DrawingPlan) -> tuple[tuple[int, int, int], ...]:
        layer_shape, *images = super()._shapes(plan)
        return (*(layer_shape,) * (plan.layers + 1), *images)

    def noise(self, plan: DrawingPlan, conditions: Conditions, generator: torch.Generator) -> Tensor:
        """The noise of the whole picture and of each layer, packed: [1, tokens, 4 * channels]."""
        _, height, width = conditions.shapes[0]
        shape = (1, plan.layers + 1, self.channels, 2 * height, 2 * width)
        return self._packed(torch.randn(shape, generator=generator, dtype=conditions.positive.dtype).to(self.device))

    def _packed(self, frames: Tensor) -> Tensor:
        """The latents [1, frames, channels, height, width] as [1, tokens, 4 * channels]."""
        count, *rest = frames.shape[1:]
        packed: Tensor = self.pipe._pack_latents(frames, 1, *rest, count)
        return packed

    def sigmas(self, steps: int) -> NDArray[np.float64]:
        return np.linspace(1.0, 0, steps + 1)[:-1]

    def shift(self, plan: DrawingPlan) -> float:
        """The shift for the picture that is taken apart, which is as large as each layer."""
        return float((math.prod(self._shape(plan.width, plan.height)) / LAYERED_SHIFT_TOKENS) ** 0.5)

    def _extra_arguments(self, count: int) -> dict[str, Tensor]:
        return {"additional_t_cond": torch.zeros(count, dtype=torch.long, device=self.device)}

    def guided(self, positive: Tensor, negative: Tensor, canvas: Canvas) -> Tensor:
        guided = QwenImagePainter.guided if canvas.plan.option("cfg_normalize", False) else Painter.guided
        return guided(self, positive, negative, canvas)

    def _frames(self, latents: Tensor, plan: DrawingPlan) -> Tensor:
        """The latents as grids, [1 + layers, channels, height, width]; the first is the whole picture."""
        unpacked: Tensor = self.pipe._unpack_latents(latents, plan.height, plan.width, plan.layers, self.pipe.vae_scale_factor)
        return unpacked[0].transpose(0, 1)

    def grids(self, latents: Tensor, plan: DrawingPlan) -> Tensor:
        return self._frames(latents, plan)[1:]

    def frames(self, plan: DrawingPlan) -> int:
        return plan.layers + 1

    def preview_grid(self, latents: Tensor, plan: DrawingPlan) -> Tensor:
        return self._frames(latents, plan)[:1]
