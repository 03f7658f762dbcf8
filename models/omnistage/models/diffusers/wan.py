"""Films by Wan 2.1 and 2.2 (Wan et al. 2025): from words, from a picture and words, by one transformer or two.

Of two transformers the first one has the steps of much noise and the second one those of little (`boundary_ratio`). A checkpoint of
`expand_timesteps` (TI2V) draws from words and, where a picture is given, from that: its first frame of latents is the picture in every
step, and has no noise.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from torch import Tensor

from omnistage.models.diffusers.films import FilmPainter, decoded_in_turn
from omnistage.models.diffusers.own_options import Range
from omnistage.models.diffusers.painter import CUT, Canvas, Conditions, Row
from omnistage.models.diffusers.plan import Limits, Plan
from omnistage.models.diffusers.sampler import min_steps
from omnistage.models.diffusers.stepcache import StepCache

MOST_TOKENS = 512
RATE_HZ, EXPANDED_RATE_HZ = 16.0, 24.0
"""Frames a second, as published: no file says it. Of TI2V, the second one."""
MAX_FRAMES = 1024


class WanPainter(FilmPainter):
    """Of words."""

    followed: ClassVar[frozenset[str]] = frozenset(
        (
            *("transformer.in_channels", "transformer.patch_size", "vae.latents_mean", "vae.latents_std", "vae.z_dim"),
            *("vae.scale_factor_spatial", "vae.scale_factor_temporal"),
        )
    )
    follows: ClassVar[Mapping[str, Range]] = {CUT: (1, MOST_TOKENS)}

    def _own_limits(self) -> Limits:
        side = int(self.pipe.vae_scale_factor_spatial)
        _, height, width = self.pipe.transformer.config.patch_size
        return Limits(
            multiple=side * max(height, width),
            width=self._default("width"),
            height=self._default("height"),
            steps=self._default("num_inference_steps"),
            guidance=self._default("guidance_scale"),
            min_steps=min_steps(self.pipe.scheduler),
            max_results=1,
            max_sigma=0.0,
            previewed=False,
            step_cached=False,
            frames=self._default("num_frames"),
            frame_multiple=int(self.pipe.vae_scale_factor_temporal),
            max_frames=MAX_FRAMES,
            second_guidance=self._boundary is not None,
            rate_hz=EXPANDED_RATE_HZ if self._expands else RATE_HZ,
            shifted=True,
        )

    @property
    def _boundary(self) -> float | None:
        """The least timestep of the first transformer; None: there is no second one."""
        ratio = self.pipe.config.boundary_ratio
        return None if ratio is None else float(ratio * self.pipe.scheduler.config.num_train_timesteps)

    @property
    def _expands(self) -> bool:
        return bool(self.pipe.config.expand_timesteps)

    def text_tokens(self, text: str) -> tuple[int, int]:
        return len(self.counting(prompt_clean(text))["input_ids"]), MOST_TOKENS

    def tokens(self, plan: Plan) -> int:
        height, width = map(int, self.pipe.transformer.config.patch_size[1:])
        return self.frames(plan) * self.grid_places(plan) // (height * width)

    def _conditions(self, plan: Plan) -> Conditions:
        return Conditions(*self.texts(plan))

    def text(self, plan: Plan, text: str) -> Tensor:
        """[tokens, width], zeros behind the words: the transformer looks at those too."""
        rows: Tensor = self.pipe._get_t5_prompt_embeds(text, 1, self.words_drawn(plan), self.device)[0]
        return rows.to(self.dtype)

    def noise(self, plan: Plan, conditions: Conditions, generator: torch.Generator) -> Tensor:
        side = int(self.pipe.vae_scale_factor_spatial)
        shape = (1, self.channels, self.frames(plan), plan.height // side, plan.width // side)
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(self.device)

    def sigmas(self, steps: int) -> int:
        """The pipeline leaves them to the scheduler, and says how many."""
        return steps

    def shift(self, plan: Plan) -> float:
        return plan.flow_shift

    def _scheduled(self, sigmas: Any, mu: float, device: torch.device | str) -> Any:
        """sigmas: the number of steps. mu: of the flow, 0 as the config has it."""
        kind, config = type(self.pipe.scheduler), self.pipe.scheduler.config
        name = "flow_shift" if "flow_shift" in config else "shift"
        scheduler = kind.from_config(config, **({name: mu} if mu else {}))
        scheduler.set_timesteps(sigmas, device=device)
        return scheduler

    def _expert(self, canvas: Canvas) -> tuple[Any, float]:
        """The transformer of its next step, and the scale of guidance."""
        boundary = self._boundary
        if boundary is None or canvas.sampler.timestep >= boundary:
            return self.pipe.transformer, canvas.plan.guidance
        return self.pipe.transformer_2, canvas.plan.guidance_2

    def group(self, canvas: Canvas) -> Hashable:
        """Of one transformer and one size, whose words are filled up alike."""
        return self._expert(canvas)[0] is self.pipe.transformer, canvas.latents.shape, len(canvas.conditions.positive)

    def own_step_cache(self) -> StepCache:
        return StepCache((), ())

    def velocities(self, rows: Sequence[Row]) -> list[Tensor]:
        transformer, _ = self._expert(rows[0].canvas)
        made = transformer(
            hidden_states=torch.cat([self._entered(row.canvas) for row in rows]).to(self.dtype),
            timestep=torch.stack([self._times(row.canvas) for row in rows]),
            encoder_hidden_states=torch.stack([row.text for row in rows]),
            return_dict=False,
        )[0]
        return [each[None] for each in made.float()]

    def _entered(self, canvas: Canvas) -> Tensor:
        """What the transformer is given of it."""
        return canvas.scaled

    def _times(self, canvas: Canvas) -> Tensor:
        """0-dimensional, or [tokens] where each has its own."""
        time = canvas.sampler.timestep
        return time.expand(self.tokens(canvas.plan)) if self._expands else time

    def guided(self, positive: Tensor, negative: Tensor, canvas: Canvas) -> Tensor:
        return negative + self._expert(canvas)[1] * (positive - negative)

    @property
    def channels(self) -> int:
        return int(self.pipe.vae.config.z_dim)

    def decoded(self, latents: Tensor) -> Iterator[Tensor]:
        vae = self.pipe.vae
        mean, std = (
            torch.tensor(each).view(1, -1, 1, 1, 1).to(latents.device, vae.dtype)
            for each in (vae.config.latents_mean, vae.config.latents_std)
        )
        # In this order of operations: another one is another film by a bit.
        return decoded_in_turn(vae, latents.to(vae.dtype) / (1.0 / std) + mean)
