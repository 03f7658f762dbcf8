"""Z-Image: pictures of any sizes in one pass. The default picture model has its form too."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from omnistage.models.diffusers.own_options import Range
from omnistage.models.diffusers.painter import TOKEN_LIMIT, BatchRow, Canvas, Conditions, linear_shift
from omnistage.models.diffusers.pictures import PicturePainter
from omnistage.models.diffusers.plan import DrawingLimits, DrawingPlan
from omnistage.models.diffusers.sampling import StepCache, min_steps

MAX_TOKENS = 512
"""The limit of tokens of a prompt with its template, as in the pipeline."""
PAD = 32
"""The transformer rounds numbers of tokens up to a multiple of this number."""


class ZImagePainter(PicturePainter):
    """Draws from words alone; pictures of any sizes share a pass."""

    follows: ClassVar[Mapping[str, Range]] = {TOKEN_LIMIT: (1, MAX_TOKENS), "cfg_normalization": (0, 1), "cfg_truncation": (0, 1)}

    def _own_limits(self) -> DrawingLimits:
        """The limits of the pipeline. The table of places in the transformer limits the sides."""
        multiple = self.pipe.vae_scale_factor * 2
        return DrawingLimits(
            multiple=multiple,
            max_side=multiple * min(self.pipe.transformer.axes_lens[1:]),
            width=1024,
            height=1024,
            steps=50,
            guidance=5.0,
            guided_above=0.0,
            min_steps=min_steps(self.pipe.scheduler),
        )

    def text_tokens(self, text: str) -> tuple[int, int]:
        """The number of tokens of a text in its template, and its limit: the pipeline's, or the transformer's places for words."""
        placed = (self.pipe.transformer.axes_lens[0] - 2) // PAD * PAD
        return len(self._ids(self.counting, text)), min(MAX_TOKENS, placed)

    def tokens(self, plan: DrawingPlan) -> int:
        height, width = self._latent_size(plan)
        return -(-(height // 2) * (width // 2) // PAD) * PAD

    def _conditions(self, plan: DrawingPlan) -> Conditions:
        return Conditions(*self.texts(plan))

    def _ids(self, tokenizer: Any, text: str) -> list[int]:
        """The token ids of a text, in the template of a chat."""
        turns = [{"role": "user", "content": text}]
        chat = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, enable_thinking=True)
        ids: list[int] = tokenizer(chat)["input_ids"]
        return ids

    def text(self, plan: DrawingPlan, text: str) -> Tensor:
        """The rows of a text, [tokens, width]. The pipeline encodes padding too; no token sees later ones, so the rows are equal."""
        ids = torch.tensor([self._ids(self.pipe.tokenizer, text)[: self.words_drawn(plan)]], device=self.pipe.text_encoder.device)
        rows: Tensor = self.pipe.text_encoder(input_ids=ids, output_hidden_states=True).hidden_states[-2][0]
        return rows.to(self.device)

    def _latent_size(self, plan: DrawingPlan) -> tuple[int, int]:
        """The height and width of the latents."""
        return plan.height // self.pipe.vae_scale_factor, plan.width // self.pipe.vae_scale_factor

    def noise(self, plan: DrawingPlan, conditions: Conditions, generator: torch.Generator) -> Tensor:
        shape = (1, self.pipe.transformer.in_channels, *self._latent_size(plan))
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(self.device)

    def sigmas(self, steps: int) -> list[float]:
        sigmas: list[float] = torch.linspace(1.0, 1 / steps, steps).tolist()
        return sigmas

    def shift(self, plan: DrawingPlan) -> float:
        height, width = self._latent_size(plan)
        return linear_shift(self.pipe.scheduler, (height // 2) * (width // 2))

    def group(self, canvas: Canvas) -> Hashable:
        return None

    def own_step_cache(self) -> StepCache:
        """The step cache around the layers (not the refiners), whose arguments are the rows, their mask, places and times."""
        return StepCache(self.pipe.transformer.layers, (1, 2, 3))

    def length(self, row: BatchRow) -> int:
        """The tokens of the picture and of the words, each padded."""
        return self.tokens(row.canvas.plan) + -(-len(row.text) // PAD) * PAD

    def velocities(self, rows: Sequence[BatchRow]) -> list[Tensor]:
        """The transformer's output for each row, in the shape of its latents. The transformer gets lists, and fills up the shorter rows."""
        latents = [row.canvas.scaled[0, :, None].to(self.dtype) for row in rows]
        times = torch.stack([(1000 - row.canvas.sampler.timestep) / 1000 for row in rows])
        output = self.pipe.transformer(latents, times, [row.text for row in rows], return_dict=False)[0]
        return [-each[:, 0].float()[None] for each in output]

    def guided(self, positive: Tensor, negative: Tensor, canvas: Canvas) -> Tensor:
        """The velocity after guidance, which an option makes no longer than the prompt's own velocity."""
        velocity = positive + canvas.plan.guidance * (positive - negative)
        if canvas.plan.option("cfg_normalization", False):
            # No longer than the prompt's own velocity, for all places together.
            prompt_norm, guided_norm = torch.linalg.vector_norm(positive), torch.linalg.vector_norm(velocity)
            return velocity * (prompt_norm / guided_norm) if guided_norm > prompt_norm else velocity
        return velocity

    def is_guided(self, canvas: Canvas) -> bool:
        """Whether the next step of the canvas is guided: a request may leave the last steps unguided, see cfg_truncation."""
        gone = float((1000 - canvas.sampler.timestep.float()) / 1000)
        return super().is_guided(canvas) and gone <= float(canvas.plan.option("cfg_truncation", 1.0))

    @property
    def channels(self) -> int:
        return int(self.pipe.transformer.in_channels)

    def grids(self, latents: Tensor, plan: DrawingPlan) -> Tensor:
        return latents

    def decoded(self, grid: Tensor) -> Tensor:
        """The picture that the VAE makes of a grid: [1, samples, height, width], -1 to 1."""
        vae = self.pipe.vae
        picture: Tensor = vae.decode(grid.to(vae.dtype) / vae.config.scaling_factor + vae.config.shift_factor, return_dict=False)[0]
        return picture
