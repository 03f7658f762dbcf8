"""Sound by Stable Audio Open (Evans et al. 2024), whose transformer gets the begin and the end of the sound.

The latents always have the length of the longest sound; the model learned to leave the part after the requested seconds silent. So sounds
of all lengths share a pass, and each is cut to its own length."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderOobleck
from diffusers.models.embeddings import get_1d_rotary_pos_embed
from torch import Tensor

from omnistage.models.checkpoint.files import BadCheckpoint
from omnistage.models.diffusers.own_options import Range
from omnistage.models.diffusers.painter import BatchRow, Canvas, Conditions
from omnistage.models.diffusers.plan import DrawingLimits, DrawingPlan
from omnistage.models.diffusers.sampling import StepCache, min_steps
from omnistage.models.diffusers.sounds import SoundPainter, Upsampling

USUAL_S = 10.0
"""Usual seconds of a model that can make more: the pipeline always makes the longest sound, which is slow."""

# The first and the last level of noise, and the 0 after it, lie outside the tree of noise, which uses its ends for them.
warnings.filterwarnings("ignore", "Should have t[ab]", UserWarning, "torchsde")


class StableAudioPainter(SoundPainter):
    """The loop of Stable Audio. Conditions: rows of the words, then one row for the first second and one for the last."""

    followed: ClassVar[frozenset[str]] = frozenset(
        (
            *("transformer.attention_head_dim", "transformer.in_channels", "transformer.sample_size"),
            *("text_encoder.model_type", "vae.audio_channels", "vae.sampling_rate"),
        )
    )
    follows: ClassVar[Mapping[str, Range]] = {}

    def __init__(self, pipe: Any, *others: Any) -> None:
        """Raises BadCheckpoint for parts that do not fit each other."""
        if not isinstance(pipe.vae, AutoencoderOobleck):
            raise BadCheckpoint(f"model_index.json: vae is {type(pipe.vae).__name__}; give AutoencoderOobleck")
        vae_channels, transformer_channels = pipe.vae.config.decoder_input_channels, pipe.transformer.config.in_channels
        if vae_channels != transformer_channels:
            fault = f"in_channels is {transformer_channels}, and the VAE has {vae_channels} channels"
            raise BadCheckpoint(f"transformer/config.json: {fault}; is it a transformer of another pipeline?")
        super().__init__(pipe, *others)

    def _own_limits(self) -> DrawingLimits:
        """The limits of the pipeline. The length of the latents limits the seconds."""
        max_seconds = self.latent_length * self.upsampling.hop / self.rate_hz
        return DrawingLimits(
            multiple=1,
            width=0,
            height=0,
            steps=self._default("num_inference_steps"),
            guidance=self._default("guidance_scale"),
            min_steps=min_steps(self.pipe.scheduler),
            max_results=1,
            max_sigma=0.0,
            previewed=False,
            step_cached=False,
            sized=False,
            seconds=min(USUAL_S, max_seconds),
            max_seconds=max_seconds,
            begins=True,
        )

    def text_tokens(self, text: str) -> tuple[int, int]:
        return len(self.counting(text)["input_ids"]), int(self.counting.model_max_length)

    def tokens(self, plan: DrawingPlan) -> int:
        return self.latent_length + 1

    def _conditions(self, plan: DrawingPlan) -> Conditions:
        """The encoded words and times. Without a negative prompt, guidance leads away from nothing at all: not even a length."""
        times = torch.cat(self.pipe.encode_duration(plan.begin_s, plan.begin_s + plan.seconds, self.device, False, 1), dim=1)[0]
        positive = torch.cat([self._words(plan, plan.prompt), times])
        if plan.negative is None:
            return Conditions(positive, None)
        negative = torch.cat([self._words(plan, plan.negative), times]) if plan.negative else torch.zeros_like(positive)
        return Conditions(positive, negative)

    def _words(self, plan: DrawingPlan, text: str) -> Tensor:
        return self._texts.get(text, partial(self.text, plan, text))

    def text(self, plan: DrawingPlan, text: str) -> Tensor:
        """The rows of a text, [tokens, width], with zeros after the words."""
        rows: Tensor = self.pipe.encode_prompt(text, self.device, False)[0]
        return rows

    def noise(self, plan: DrawingPlan, conditions: Conditions, generator: torch.Generator) -> Tensor:
        return torch.randn((1, self.channels, self.latent_length), generator=generator, dtype=torch.float32).to(self.device)

    def sigmas(self, steps: int) -> int:
        """The number of steps: the scheduler makes the sigmas by itself."""
        return steps

    def shift(self, plan: DrawingPlan) -> float:
        """Unused, for this is no flow."""
        return 0.0

    def _scheduled(self, sigmas: Any, mu: float, device: torch.device | str) -> Any:
        """A new scheduler with its timesteps set. sigmas: the number of steps. mu: unused."""
        scheduler = type(self.pipe.scheduler).from_config(self.pipe.scheduler.config)
        scheduler.set_timesteps(sigmas, device=device)
        return scheduler

    def group(self, canvas: Canvas) -> Hashable:
        """All sounds are in one group: words are padded to one length."""
        return canvas.latents.shape, len(canvas.conditions.positive)

    def own_step_cache(self) -> StepCache:
        return StepCache((), ())

    def velocities(self, rows: Sequence[BatchRow]) -> list[Tensor]:
        """The transformer's output for each row, in the shape of its latents."""
        lasting = torch.stack([row.canvas.conditions.positive[-2:].flatten()[None] for row in rows])
        output = self.pipe.transformer(
            torch.cat([row.canvas.scaled for row in rows]).to(self.dtype),
            torch.stack([row.canvas.sampler.timestep for row in rows]),
            encoder_hidden_states=torch.stack([row.text for row in rows]),
            global_hidden_states=lasting,
            rotary_embedding=self._places,
            return_dict=False,
        )[0]
        return [each[None] for each in output.float()]

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rotary embedding (Su et al. 2021), each [1 + length, half a head]: the first is for the seconds."""
        width, places = self.pipe.rotary_embed_dim, self.latent_length + 1
        cosines, sines = get_1d_rotary_pos_embed(width, places, use_real=True, repeat_interleave_real=False)
        return cosines.to(self.device), sines.to(self.device)

    @property
    def channels(self) -> int:
        return int(self.pipe.transformer.config.in_channels)

    @property
    def latent_length(self) -> int:
        return int(self.pipe.transformer.config.sample_size)

    @property
    def rate_hz(self) -> int:
        return int(self.pipe.vae.config.sampling_rate)

    @property
    def sound_channels(self) -> int:
        return int(self.pipe.vae.config.audio_channels)

    @cached_property
    def upsampling(self) -> Upsampling:
        return Upsampling(self.pipe.vae.decoder)

    def samples(self, latents: Tensor) -> Tensor:
        samples: Tensor = self.pipe.vae.decode(latents.to(self.pipe.vae.dtype)).sample
        return samples.float()
