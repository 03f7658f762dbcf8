"""LongCat-Image: pictures from words, in English and Chinese; and from words and one picture (Edit).

The quoted parts of a prompt are read letter by letter, because they shall be written in the picture. `split_quotation` replaces the
function of the same name in Diffusers. That function puts each word with an apostrophe aside under a name that is part of the next
word's name: it turns "it's a dog that doesn't bark" into "it's a dog that it'sit's bark", in an order that differs between processes,
and 800 such words take it five seconds. For a text with at most one such word both functions agree."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from diffusers.pipelines.longcat_image import pipeline_longcat_image, pipeline_longcat_image_edit
from diffusers.pipelines.longcat_image.pipeline_longcat_image import prepare_pos_ids
from diffusers.pipelines.longcat_image.pipeline_longcat_image_edit import calculate_dimensions
from numpy.typing import NDArray
from torch import Tensor

from omnistage.models.diffusers.own_options import Range
from omnistage.models.diffusers.painter import BatchRow, Canvas, Conditions, Painter, linear_shift, with_images
from omnistage.models.diffusers.pictures import PicturePainter
from omnistage.models.diffusers.plan import DrawingLimits, DrawingPlan
from omnistage.models.diffusers.sampling import StepCache, min_steps

WITH_APOSTROPHE = re.compile(r"[a-zA-Z]+'[a-zA-Z]+")
QUOTED = re.compile("('[^']*?'|\"[^\"]*?\"|‘[^‘’]*?’|“[^“”]*?”)")
PRIVATE = range(0xF0000, 0xFFFFE)
"""Characters without a meaning, more than a prompt can have, so that one of them is free to stand for an apostrophe."""


def split_quotation(prompt: str) -> list[tuple[str, bool]]:
    """All of a prompt in pieces, each with a flag: whether it is quoted. Quotation marks are part of their piece."""
    aside = next(chr(code) for code in PRIVATE if chr(code) not in prompt)
    masked_prompt = WITH_APOSTROPHE.sub(lambda word: word[0].replace("'", aside), prompt)
    return [(part.replace(aside, "'"), bool(place % 2)) for place, part in enumerate(QUOTED.split(masked_prompt)) if part]


def mend(*modules: Any) -> None:
    """Make modules of Diffusers use `split_quotation`."""
    for module in modules:
        module.split_quotation = split_quotation


mend(pipeline_longcat_image, pipeline_longcat_image_edit)

CHANNELS = 16
"""Channels of the latents; the pipelines know no other number."""


class LongCatPainter(PicturePainter):
    """Draws from words alone. The pipeline would first let its text encoder rewrite the prompt, up to 512 tokens: that is not done here."""

    follows: ClassVar[Mapping[str, Range]] = {"enable_cfg_renorm": (0, 1), "cfg_renorm_min": (0, 1)}

    def _own_limits(self) -> DrawingLimits:
        multiple = self.pipe.vae_scale_factor * 2
        return DrawingLimits(multiple=multiple, width=1024, height=1024, steps=50, guidance=4.5, min_steps=min_steps(self.pipe.scheduler))

    def text_tokens(self, text: str) -> tuple[int, int]:
        """The number of tokens of a text, and its limit. Quoted text counts letter by letter, and a letter is at least one token. If there
        are more letters and other parts than the limit, only these parts are counted."""
        max_tokens = int(self.pipe.tokenizer_max_length)
        parts = Counter(part for words, quoted in split_quotation(text) for part in (words if quoted else [words]))
        if parts.total() > max_tokens:
            return parts.total(), max_tokens
        return sum(times * len(self.counting(part, add_special_tokens=False)["input_ids"]) for part, times in parts.items()), max_tokens

    def _shape(self, plan: DrawingPlan) -> tuple[int, int, int]:
        """The shape of the result in tokens: frames (1), height and width."""
        side = self.pipe.vae_scale_factor * 2
        return 1, plan.height // side, plan.width // side

    def tokens(self, plan: DrawingPlan) -> int:
        """The number of latent tokens, and tokens of the words: words are padded to hundreds of rows, and all of these are computed."""
        _, height, width = self._shape(plan)
        return height * width * (1 + len(plan.images)) + int(self.pipe.tokenizer_max_length)

    # 2: preprocess

    def _conditions(self, plan: DrawingPlan) -> Conditions:
        return Conditions(*self.texts(plan), self._image_latents(plan), (self._shape(plan),))

    def text(self, plan: DrawingPlan, text: str) -> Tensor:
        """The rows of a text, [512, width], with rows for the padding, because the transformer sees them too."""
        rows: Tensor = self.pipe._encode_prompt([text])[0]
        return rows

    def _image_latents(self, plan: DrawingPlan) -> Tensor | None:
        """The latents of the edited picture, [tokens, channels]; None if no picture is edited."""
        return None

    def noise(self, plan: DrawingPlan, conditions: Conditions, generator: torch.Generator) -> Tensor:
        """The noise that a picture begins with, packed: [1, tokens, 4 * CHANNELS]."""
        _, height, width = conditions.shapes[0]
        shape = (1, CHANNELS, 2 * height, 2 * width)
        noise = self._draw_noise(shape, conditions.positive.dtype, generator).to(self.device)
        packed: Tensor = self.pipe._pack_latents(noise, 1, CHANNELS, 2 * height, 2 * width)
        return packed

    def _draw_noise(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    def sigmas(self, steps: int) -> NDArray[np.float64]:
        return np.linspace(1.0, 1.0 / steps, steps)

    def shift(self, plan: DrawingPlan) -> float:
        return linear_shift(self.pipe.scheduler, math.prod(self._shape(plan)))

    # 3: execute

    def group(self, canvas: Canvas) -> Hashable:
        """Pictures of a group have equal shapes: the places of tokens are computed once for a batch."""
        return canvas.conditions.shapes

    def own_step_cache(self) -> StepCache:
        """One step cache around all blocks: those with two streams, then those with one."""
        transformer = self.pipe.transformer
        return StepCache([*transformer.transformer_blocks, *transformer.single_transformer_blocks], ("temb",))

    def velocities(self, rows: Sequence[BatchRow]) -> list[Tensor]:
        """The transformer's output for each row, in the shape of its latents. All rows of a pass are equally long."""
        text_tokens, latent_tokens = len(rows[0].text), rows[0].canvas.latents.shape[1]
        output: Tensor = self.pipe.transformer(
            hidden_states=torch.cat([with_images(row) for row in rows]),
            timestep=torch.stack([row.canvas.sampler.timestep for row in rows]).to(rows[0].canvas.latents.dtype) / 1000,
            encoder_hidden_states=torch.stack([row.text for row in rows]),
            txt_ids=prepare_pos_ids(modality_id=0, type="text", start=(0, 0), num_token=text_tokens).to(self.device),
            img_ids=self._places(rows[0]).to(self.device),
            return_dict=False,
        )[0]
        return list(torch.split(output[:, :latent_tokens], 1))

    def _places(self, row: BatchRow) -> Tensor:
        """[tokens, 3]: the places of the latent tokens, which come after the places of the words."""
        _, height, width = row.canvas.conditions.shapes[0]
        start = (self.pipe.tokenizer_max_length,) * 2
        places: Tensor = prepare_pos_ids(modality_id=1, type="image", start=start, height=height, width=width)
        return places

    def guided(self, positive: Tensor, negative: Tensor, canvas: Canvas) -> Tensor:
        """The velocity after guidance, scaled down where it is longer than the velocity of the prompt alone."""
        velocity = super().guided(positive, negative, canvas)
        if not canvas.plan.option("enable_cfg_renorm", True):
            return velocity
        prompt_norm, norm = (torch.linalg.vector_norm(each, dim=-1, keepdim=True) for each in (positive, velocity))
        scaled: Tensor = velocity * (prompt_norm / (norm + 1e-8)).clamp(min=float(canvas.plan.option("cfg_renorm_min", 0.0)), max=1.0)
        return scaled

    # 4: postprocess

    @property
    def channels(self) -> int:
        return CHANNELS

    def grids(self, latents: Tensor, plan: DrawingPlan) -> Tensor:
        unpacked: Tensor = self.pipe._unpack_latents(latents, plan.height, plan.width, self.pipe.vae_scale_factor)
        return unpacked

    def decoded(self, grid: Tensor) -> Tensor:
        """The picture that the VAE makes of a grid: [1, samples, height, width], -1 to 1."""
        vae = self.pipe.vae
        scaled = grid / vae.config.scaling_factor + vae.config.shift_factor
        picture: Tensor = vae.decode(scaled.to(vae.dtype), return_dict=False)[0]
        return picture


class LongCatEditPainter(LongCatPainter):
    """Edits one picture; the result has its shape and about AREA pixels."""

    follows: ClassVar[Mapping[str, Range]] = {}

    def _own_limits(self) -> DrawingLimits:
        return replace(super()._own_limits(), width=0, height=0, images=(1, 1), sized=False)

    def sized(self, plan: DrawingPlan) -> DrawingPlan:
        width, height = plan.images[0].resized[0].size
        return replace(plan, width=width, height=height)

    def _fits(self, plan: DrawingPlan, ratio: float) -> list[tuple[int, int]]:
        width, height = calculate_dimensions(self._area, ratio)
        return [(int(width), int(height))]

    def text(self, plan: DrawingPlan, text: str) -> Tensor:
        """The rows of a text. The text encoder also sees the picture, at half the width and height at which the VAE sees it."""
        image = plan.images[0].resized[0]
        rows: Tensor = self.pipe._encode_prompt([text], self.pipe.image_processor.resize(image, image.height // 2, image.width // 2))[0]
        return rows

    def _image_latents(self, plan: DrawingPlan) -> Tensor:
        key = (plan.sources, plan.width, plan.height)
        return self._pictures.get(key, partial(self._latents, plan))

    def _latents(self, plan: DrawingPlan) -> Tensor:
        """The latents of the edited picture, packed: [tokens, channels]."""
        pixels = self.pipe.image_processor.preprocess(plan.images[0].resized[0], plan.height, plan.width).to(self.device, self.dtype)
        latents = self.pipe._encode_vae_image(image=pixels, generator=None)
        packed: Tensor = self.pipe._pack_latents(latents, 1, CHANNELS, *latents.shape[2:])
        return packed[0]

    def _draw_noise(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    def _places(self, row: BatchRow) -> Tensor:
        """[tokens, 3]: the places of the latent tokens of the result, and then of the edited picture."""
        _, height, width = row.canvas.conditions.shapes[0]
        start = (len(row.text),) * 2
        places = [prepare_pos_ids(modality_id=number, type="image", start=start, height=height, width=width) for number in (1, 2)]
        return torch.cat(places).to(torch.float64)

    guided = Painter.guided
