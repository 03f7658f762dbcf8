"""Films by Wan 2.1 and 2.2 (Wan et al. 2025): from words, from a picture and words, by one transformer or two.

With two transformers the first draws the steps of much noise and the second the steps of little (`boundary_ratio`). A picture is the
first frame. A checkpoint of `expand_timesteps` (TI2V) draws with or without a picture: the latents of the picture are the first frame in
every step, and have no noise. Other checkpoints (I2V) see the picture as further channels of the latents: they say which frames are
given, and hold the latents of a film of the given frames, else grey. Some I2V checkpoints see the picture through an encoder of pictures
too.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from diffusers import AutoencoderKLWan, WanPipeline
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from PIL import Image as pillow
from PIL.Image import Image
from torch import Tensor

from omnistage.models.checkpoint.files import BadCheckpoint
from omnistage.models.diffusers.films import FilmPainter, decode_frames
from omnistage.models.diffusers.own_options import Range
from omnistage.models.diffusers.painter import TOKEN_LIMIT, BatchRow, Canvas, Conditions
from omnistage.models.diffusers.placement import is_tiled
from omnistage.models.diffusers.plan import DrawingLimits, DrawingPlan, EditedPicture, crop_to_shape, in_shape
from omnistage.models.diffusers.sampling import StepCache, min_steps
from omnistage.models.drawing_options import MAX_SIDE
from omnistage.models.interface import BadRequest
from omnistage.models.media.terms import BadMedia

MAX_TOKENS = 512
RATE_HZ, EXPANDED_RATE_HZ = 16.0, 24.0
"""Frames a second, as published: no file says it. The second rate is for TI2V."""
MAX_FRAMES = 1024
ENCODED_FRAMES = 4
"""The number of frames that the VAE encodes together."""
SIDES = 16
"""The pipelines refuse sides that are no multiple of this number."""
FROM_PICTURES = "WanImageToVideoPipeline"
ALIKE = ("patch_size", "in_channels", "out_channels", "text_dim", "image_dim")
"""Values that the configs of both transformers have in common."""


class WanPainter(FilmPainter):
    """Draws films from words, and from one picture or two. Conditions.images are latents [1, channels, frames, height, width]: for TI2V
    of the first frame alone; for I2V of all frames, and the channels of the mask come before the channels of the latents."""

    followed: ClassVar[frozenset[str]] = frozenset(
        (
            *("transformer.in_channels", "transformer.patch_size", "transformer.image_dim", "vae.latents_mean", "vae.latents_std"),
            *("vae.z_dim", "vae.scale_factor_spatial", "vae.scale_factor_temporal"),
        )
    )
    follows: ClassVar[Mapping[str, Range]] = {TOKEN_LIMIT: (1, MAX_TOKENS)}

    def __init__(self, pipe: Any, *others: Any) -> None:
        """Raises BadCheckpoint for parts that do not fit each other."""
        check_parts(pipe)
        super().__init__(pipe, *others)

    def _own_limits(self) -> DrawingLimits:
        """The limits of the pipeline. The places that the transformers know limit the sides and the number of frames."""
        patch_frames, height, width = self.pipe.transformer.config.patch_size
        side, ratio = int(self.pipe.vae_scale_factor_spatial), int(self.pipe.vae_scale_factor_temporal)
        multiple, max_positions = math.lcm(side * height, side * width, SIDES), _positions(self.pipe)
        max_side = min(MAX_SIDE, max_positions * side * min(height, width))
        max_latent_frames = max_positions * patch_frames
        latent_frames = min(1 + (self._default("num_frames") - 1) // ratio, max_latent_frames) // patch_frames * patch_frames
        frame_multiple = patch_frames * ratio
        return DrawingLimits(
            multiple=multiple,
            width=max(min(self._default("width"), max_side) // multiple, 1) * multiple,
            height=max(min(self._default("height"), max_side) // multiple, 1) * multiple,
            steps=self._default("num_inference_steps"),
            guidance=self._default("guidance_scale"),
            max_side=max_side,
            min_steps=min_steps(self.pipe.scheduler),
            images=self._images,
            max_results=1,
            max_sigma=0.0,
            previewed=False,
            step_cached=False,
            frames=1 + (latent_frames - 1) * ratio,
            frame_multiple=math.lcm(frame_multiple, ENCODED_FRAMES) if self._adds_channels else frame_multiple,
            max_frames=min(MAX_FRAMES, 1 + (max_latent_frames - 1) * ratio),
            second_guidance=self._boundary is not None,
            rate_hz=EXPANDED_RATE_HZ if self._expands else RATE_HZ,
            # Whether two shifts make different schedules, tried with a few steps.
            shifted=not torch.equal(*(self._scheduled(ENCODED_FRAMES, mu, "cpu").sigmas for mu in (2.0, 4.0))),
            shaped=True,
        )

    @property
    def _images(self) -> tuple[int, int]:
        """The smallest and the largest number of pictures that a film may begin from, or begin and end with."""
        if self._expands:
            return 0, 1
        if not self._adds_channels:
            return 0, 0
        if not self._sees:
            return 1, 2
        count = 1 if self.pipe.transformer.config.pos_embed_seq_len is None else 2
        return count, count

    @property
    def _boundary(self) -> float | None:
        """The smallest timestep of the first transformer; None if there is no second one."""
        ratio = self.pipe.config.boundary_ratio
        return None if ratio is None else float(ratio * self.pipe.scheduler.config.num_train_timesteps)

    @property
    def _expands(self) -> bool:
        """Whether each token has a timestep of its own, and a picture is the first frame itself (TI2V)."""
        return bool(self.pipe.config.expand_timesteps)

    @property
    def _adds_channels(self) -> bool:
        """Whether channels of pictures are added to the latents (I2V)."""
        return type(self.pipe).__name__ == FROM_PICTURES and not self._expands

    @property
    def _sees(self) -> bool:
        """Whether an encoder of pictures sees the pictures too."""
        return self._adds_channels and self.pipe.transformer.config.image_dim is not None

    def text_tokens(self, text: str) -> tuple[int, int]:
        return len(self.counting(prompt_clean(text))["input_ids"]), MAX_TOKENS

    def tokens(self, plan: DrawingPlan) -> int:
        patch: Sequence[int] = self.pipe.transformer.config.patch_size
        return self.frames(plan) * self.grid_places(plan) // math.prod(patch)

    # Pictures

    def edited(self, plan: DrawingPlan, image: Image) -> EditedPicture:
        """The picture in the size of the film, and as the encoder of pictures needs it. Raises BadMedia for too large a film."""
        picture = EditedPicture(image.width, image.height, ())
        width, height = self._size(replace(plan, images=(picture,)))
        if max(width, height) > self.limits.max_side or width * height > self.limits.max_pixels:
            raise BadMedia(f"a film of {width}x{height} would come of it: send one that is less long, or ask for another size")
        frame, note = crop_to_shape(image, width, height) if plan.width and plan.height else (image, "")
        resized = [self.pipe.video_processor.resize(frame, height, width)]
        if self._sees:
            inputs = self.pipe.image_processor(images=frame, do_rescale=False, do_normalize=False, return_tensors="np")
            resized.append(pillow.fromarray(inputs["pixel_values"][0].transpose(1, 2, 0).astype(np.uint8)))
        return replace(picture, resized=tuple(resized), note=note)

    def sized(self, plan: DrawingPlan) -> DrawingPlan:
        """The plan in the size of its pictures. Raises BadRequest for two pictures that do not fit each other or the film."""
        if not plan.images:
            return plan
        sizes = {image.resized[0].size for image in plan.images}
        if len(sizes) > 1:
            shapes = " and ".join(f"{image.width}x{image.height}" for image in plan.images)
            raise BadRequest("diffusion.images", f"they are of two shapes, {shapes}: give two of one, or width and height of the film")
        if len(plan.images) > 1 and plan.frames < 2:
            raise BadRequest("diffusion.frames", f"{plan.frames} is no film from one picture to another: ask for more")
        width, height = sizes.pop()
        return replace(plan, width=width, height=height)

    def _size(self, plan: DrawingPlan) -> tuple[int, int]:
        """The width and height of the film: as asked for, or in the shape of the picture with the usual number of pixels."""
        plan = in_shape(plan, self.limits.multiple)
        if plan.width:
            return plan.width, plan.height
        [image], area, multiple = plan.images, self.limits.width * self.limits.height, self.limits.multiple
        ratio = image.height / image.width
        width, height = (max(round((area * each) ** 0.5) // multiple, 1) * multiple for each in (1 / ratio, ratio))
        return width, height

    def _latents_of(self, plan: DrawingPlan) -> Tensor:
        """The latents of a grey film with its pictures, or for TI2V of the picture: [1, channels, frames, height, width], float32."""
        first, *last = (
            self.pipe.video_processor.preprocess(image.resized[0], plan.height, plan.width).unsqueeze(2) for image in plan.images
        )
        missing = 0 if self._expands else plan.frames - len(plan.images)
        film = torch.cat([first, first.new_zeros(1, 3, missing, plan.height, plan.width), *last], dim=2)
        vae = self.pipe.vae
        latents: Tensor = vae.encode(film.to(self.device, vae.dtype)).latent_dist.mode().float()
        mean, std = self._spread(latents)
        # Another order of operations would change bits of the film.
        return (latents - mean) * (1.0 / std)

    def _spread(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """The mean and standard deviation of the VAE's channels, each [1, channels, 1, 1, 1], in the type of the latents."""
        config = self.pipe.vae.config
        mean, std = (torch.tensor(each).view(1, -1, 1, 1, 1).to(latents) for each in (config.latents_mean, config.latents_std))
        return mean, std

    def _mask(self, latents: Tensor, count: int) -> Tensor:
        """The mask for `count` pictures, as channels for the latents: 1 in each frame of the film that is a picture. The first frame of
        the latents stands for one frame of the film, four times; each other frame stands for four together."""
        mask = latents.new_zeros(1, int(self.pipe.vae_scale_factor_temporal), *latents.shape[2:])
        mask[:, :, 0] = 1
        if count > 1:
            mask[:, -1, -1] = 1
        return mask

    def _encode_images(self, plan: DrawingPlan) -> Tensor:
        """The rows of the encoder of pictures: [pictures, tokens, width]."""
        images, encoder = [image.resized[1] for image in plan.images], self.pipe.image_encoder
        inputs = self.pipe.image_processor(images=images, do_resize=False, do_center_crop=False, return_tensors="pt").to(self.device)
        rows: Tensor = encoder(**inputs.to(encoder.dtype), output_hidden_states=True).hidden_states[-2]
        return rows.to(self.dtype)

    # Steps

    def _conditions(self, plan: DrawingPlan) -> Conditions:
        """The encoded words and, if there are any, pictures."""
        positive, negative = self.texts(plan)
        if not plan.images:
            return Conditions(positive, negative)
        latents = self._pictures.get((plan.sources, plan.width, plan.height, plan.frames), partial(self._latents_of, plan))
        if self._adds_channels:
            latents = torch.cat([self._mask(latents, len(plan.images)), latents], dim=1)
        parts_key = plan.sources, plan.width, plan.height  # The shape of the film decides which part of a picture the encoder sees.
        image_rows = self._pictures.get(parts_key, partial(self._encode_images, plan)) if self._sees else None
        return Conditions(positive, negative, latents, image_rows=image_rows)

    def text(self, plan: DrawingPlan, text: str) -> Tensor:
        """The rows of a text, [tokens, width], with zeros after the words, as the transformer looks at these too. It calls the pipeline
        of words even for pictures, because the pipeline of pictures needs ftfy for this."""
        rows: Tensor = WanPipeline._get_t5_prompt_embeds(self.pipe, text, 1, self.words_drawn(plan), self.device)[0]
        return rows.to(self.dtype)

    def noise(self, plan: DrawingPlan, conditions: Conditions, generator: torch.Generator) -> Tensor:
        """The noise that a film begins with: [1, channels, frames, height, width]."""
        side = int(self.pipe.vae_scale_factor_spatial)
        shape = (1, self.channels, self.frames(plan), plan.height // side, plan.width // side)
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(self.device)

    def sigmas(self, steps: int) -> int:
        """The number of steps: the scheduler makes the sigmas by itself."""
        return steps

    def shift(self, plan: DrawingPlan) -> float:
        return plan.flow_shift

    def _scheduled(self, sigmas: Any, mu: float, device: torch.device | str) -> Any:
        """A new scheduler with its timesteps set. sigmas: the number of steps. mu: shift of the flow; 0: the config's."""
        kind, config = type(self.pipe.scheduler), self.pipe.scheduler.config
        name = "flow_shift" if "flow_shift" in config else "shift"
        scheduler = kind.from_config(config, **({name: mu} if mu else {}))
        scheduler.set_timesteps(sigmas, device=device)
        return scheduler

    def _expert(self, canvas: Canvas) -> tuple[Any, float]:
        """The transformer for the next step of a canvas, and the scale of guidance."""
        boundary = self._boundary
        if boundary is None or canvas.sampler.timestep >= boundary:
            return self.pipe.transformer, canvas.plan.guidance
        return self.pipe.transformer_2, canvas.plan.guidance_2

    def group(self, canvas: Canvas) -> Hashable:
        """Films of equal groups can share a pass: they have one transformer, one size, and words of one padded length."""
        return self._expert(canvas)[0] is self.pipe.transformer, canvas.latents.shape, len(canvas.conditions.positive)

    def own_step_cache(self) -> StepCache:
        return StepCache((), ())

    def velocities(self, rows: Sequence[BatchRow]) -> list[Tensor]:
        """The transformer's output for each row, in the shape of its latents. All rows of a pass are for one transformer."""
        transformer, _ = self._expert(rows[0].canvas)
        image_rows = [row.canvas.conditions.image_rows for row in rows]
        output = transformer(
            hidden_states=torch.cat([self._input(row.canvas) for row in rows]).to(self.dtype),
            timestep=torch.stack([self._times(row.canvas) for row in rows]),
            encoder_hidden_states=torch.stack([row.text for row in rows]),
            encoder_hidden_states_image=torch.cat([each for each in image_rows if each is not None]) if self._sees else None,
            return_dict=False,
        )[0]
        return [each[None] for each in output.float()]

    def _input(self, canvas: Canvas) -> Tensor:
        """The transformer's input for a canvas: its latents, with the latents of its pictures."""
        images = canvas.conditions.images
        return torch.cat([canvas.latents, images], dim=1) if self._adds_channels and images is not None else self.finished(canvas)

    def _times(self, canvas: Canvas) -> Tensor:
        """The time of the next step, 0-dimensional, or [tokens] if each token has a time of its own: a picture has no noise, so time 0."""
        time = canvas.sampler.timestep
        if not self._expands:
            return time
        times = time.expand(self.tokens(canvas.plan)).clone()
        if canvas.conditions.images is not None:
            times[: len(times) // canvas.latents.shape[2]] = 0
        return times

    def guided(self, positive: Tensor, negative: Tensor, canvas: Canvas) -> Tensor:
        return negative + self._expert(canvas)[1] * (positive - negative)

    # The film

    @property
    def channels(self) -> int:
        return int(self.pipe.vae.config.z_dim)

    def finished(self, canvas: Canvas) -> Tensor:
        """The latents of a canvas; for TI2V the first frame is the picture's latents."""
        images = canvas.conditions.images
        return torch.cat([images, canvas.latents[:, :, 1:]], dim=2) if self._expands and images is not None else canvas.latents

    def decoded(self, latents: Tensor) -> Iterator[Tensor]:
        """Yields the decoded frames of latents. In tiles only the whole film can be decoded: then no frame is ready before all are."""
        vae = self.pipe.vae
        latents = latents.to(vae.dtype)
        mean, std = self._spread(latents)
        # Another order of operations would change bits of the film.
        latents = latents / (1.0 / std) + mean
        if not is_tiled(vae, latents):
            return decode_frames(vae, latents)
        return iter(torch.split(vae.decode(latents, return_dict=False)[0], 1, dim=2))


def check_parts(pipe: Any) -> None:
    """Raises BadCheckpoint for parts with which the pipeline would fail, and for values that the loop here does not follow."""
    first, second, vae = pipe.transformer, pipe.transformer_2, pipe.vae
    if first is None:
        raise BadCheckpoint("model_index.json: transformer is left out, and the first steps are its; give a checkpoint with it")
    if pipe.config.boundary_ratio and second is None:
        fault = f"boundary_ratio is {pipe.config.boundary_ratio}, and the steps below it are those of transformer_2, which is left out"
        raise BadCheckpoint(f"model_index.json: {fault}; give a checkpoint with it, or without boundary_ratio")
    if not isinstance(vae, AutoencoderKLWan):
        raise BadCheckpoint(f"model_index.json: vae is {type(vae).__name__}, and films are decoded here by AutoencoderKLWan; give that")
    for name in ALIKE if second is not None else ():
        if first.config[name] != second.config[name]:
            fault = f"{name} is {second.config[name]}, and that of transformer is {first.config[name]}"
            raise BadCheckpoint(f"transformer_2/config.json: {fault}; give two that go together")
    _check_shapes(pipe)
    if float(getattr(pipe.scheduler, "init_noise_sigma", 1.0)) != 1.0:
        fault = f"{type(pipe.scheduler).__name__} is for noise of another size than that of a flow"
        raise BadCheckpoint(f"scheduler/scheduler_config.json: {fault}; give UniPCMultistepScheduler or FlowMatchEulerDiscreteScheduler")


def _check_shapes(pipe: Any) -> None:
    """Raises BadCheckpoint for a transformer and a VAE whose shapes do not fit each other."""
    config, vae_channels, ratio = pipe.transformer.config, int(pipe.vae.config.z_dim), int(pipe.vae_scale_factor_temporal)
    expands = pipe.config.expand_timesteps
    adds_channels = type(pipe).__name__ == FROM_PICTURES and not expands
    # The added channels are those of the mask, and the latents of the pictures.
    input_channels = 2 * vae_channels + ratio if adds_channels else vae_channels
    for name, channels in (("in_channels", input_channels), ("out_channels", vae_channels)):
        if config[name] != channels:
            fault = f"{name} is {config[name]}, and {type(pipe).__name__} with a VAE of {vae_channels} channels has {channels}"
            raise BadCheckpoint(f"transformer/config.json: {fault}; is it a transformer of another pipeline?")
    if expands and tuple(config.patch_size) != (1, 2, 2):
        fault = f"patch_size is {list(config.patch_size)}, and expand_timesteps is for [1, 2, 2]"
        raise BadCheckpoint(f"transformer/config.json: {fault}; give a checkpoint of that")
    if adds_channels and (ENCODED_FRAMES % ratio or (ratio < ENCODED_FRAMES and config.patch_size[0] > 1)):
        fault = f"scale_factor_temporal is {ratio}, and it encodes {ENCODED_FRAMES} frames together"
        raise BadCheckpoint(
            f"vae/config.json: {fault}, which films from pictures by this transformer cannot be; give a VAE of {ENCODED_FRAMES}"
        )


def _positions(pipe: Any) -> int:
    """How many places in time, in height and in width all transformers of a pipeline know."""
    experts = (pipe.transformer, pipe.transformer_2)
    return min(int(expert.config.rope_max_seq_len) for expert in experts if expert is not None)
