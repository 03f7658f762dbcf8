"""The encoder of pictures and films of Qwen3-Omni: turns patches into rows of the Thinker.

It is a vision transformer with layer norms, learned positions that are interpolated for the picture's size, rotary positions on two axes
and attention within a frame. At the end, patches are merged two by two on each side: Transformers' `Qwen3OmniMoeVisionEncoder`. After some
layers, patches are merged too, to rows that the decoder adds after its first layers (DeepStack, Meng et al. 2024). The numbers of such a
row are appended to the numbers of its output row. Products run as the engine's do (omnistage.engine.linear), so the rows of a picture do
not depend on other pictures in the pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import torch
import torch.nn.functional as functional
from transformers.vision_utils import get_vision_interpolation_indices_and_weights

from omnistage.engine.linear import Linear, LinearMaker
from omnistage.models.encoders.encoder import Grid, LayerNorm, Need, Segments, Turn, places_of, turn_heads, turn_of
from omnistage.models.qwen3_omni.config import VisionConfig

NORM_EPS = 1e-6

COLUMNS = 32
"""An activation gets a multiple of this many columns, because otherwise the bits of a row could depend on other rows (see
engine.feed_forward)."""


class VisionEncoder:
    """The encoder of pictures and films; implements the common VisionEncoder. weight: returns a weight by its name without
    "thinker.visual."."""

    def __init__(self, config: VisionConfig, weight: Need, linear: LinearMaker) -> None:
        self.config = config
        patches = weight("patch_embed.proj.weight").reshape(config.hidden_size, config.patch_values)
        self._embed = linear(patches, weight("patch_embed.proj.bias"))
        self._positions = weight("pos_embed.weight").clone()
        self._blocks = [_Block(weight, f"blocks.{index}", config.heads, linear) for index in range(config.layers)]
        self._merger = _Merger(weight, "merger", config, linear, is_merged_first=False)
        self._deepstack = {
            layer: _Merger(weight, f"merger_list.{number}", config, linear, is_merged_first=True)
            for number, layer in enumerate(config.deepstack)
        }

    @property
    def device(self) -> torch.device:
        return self._positions.device

    @property
    def dtype(self) -> torch.dtype:
        return self._positions.dtype

    def encode(self, patches: torch.Tensor, grids: Sequence[Grid], on_layer: Callable[[], None] = lambda: None) -> list[torch.Tensor]:
        """See common's VisionEncoder; a row has row_size numbers."""
        config = self.config
        x = self._embed(patches) + self._interpolate_positions(grids)
        turn = turn_of(places_of(grids, config.merge, x.device), config.hidden_size // config.heads, config.rope_theta)
        frames = Segments([grid.height * grid.width for grid in grids for _ in range(grid.frames)])
        stacked = list[torch.Tensor]()
        for layer, block in enumerate(self._blocks):
            on_layer()
            x = block(x, turn, frames)
            if layer in self._deepstack:
                stacked.append(self._deepstack[layer](x))
        rows = torch.cat((self._merger(x), *stacked), 1)
        return list(torch.split(rows, [grid.patches // config.unit for grid in grids]))

    def _interpolate_positions(self, grids: Sequence[Grid]) -> torch.Tensor:
        """The learned position of each patch, interpolated from the table, [patches, hidden_size]."""
        sizes = torch.tensor([[grid.frames, grid.height, grid.width] for grid in grids], device=self.device)
        indices, shares = get_vision_interpolation_indices_and_weights(
            sizes, self.config.grid, align_corners=True, spatial_merge_size=self.config.merge
        )
        corners = [self._positions[indices[:, corner]] * shares[:, corner, None] for corner in range(indices.shape[1])]
        # One after the other, because a sum of the library may add in another order if there are more rows.
        return reduce(torch.add, corners).to(self.dtype)


class _Block:
    """One layer, from rows [patches, hidden_size] to the same shape. name: beginning of the names of its weights. When it is called: turn:
    the positions. frames: which patches see each other."""

    def __init__(self, weight: Need, name: str, heads: int, linear: LinearMaker) -> None:
        self._heads = heads
        self._attention_norm, self._ffn_norm = (LayerNorm.of(weight, f"{name}.{norm}", NORM_EPS) for norm in ("norm1", "norm2"))
        self._query_key_value, self._output = (_product(weight, f"{name}.attn.{part}", linear) for part in ("qkv", "proj"))
        up, up_bias, down = (weight(f"{name}.mlp.{part}") for part in ("linear_fc1.weight", "linear_fc1.bias", "linear_fc2.weight"))
        missing = -len(up) % COLUMNS
        self._up = linear(functional.pad(up, (0, 0, 0, missing)), functional.pad(up_bias, (0, missing)))
        self._down = linear(functional.pad(down, (0, missing)), weight(f"{name}.mlp.linear_fc2.bias"))

    def __call__(self, x: torch.Tensor, turn: Turn, frames: Segments) -> torch.Tensor:
        query, key, value = self._query_key_value(self._attention_norm(x)).view(len(x), 3, self._heads, -1).unbind(1)
        x = x + self._output(frames.attention(turn_heads(query, turn), turn_heads(key, turn), value))
        return x + self._down(functional.gelu(self._up(self._ffn_norm(x)), approximate="tanh"))


class _Merger:
    """Joins each `config.unit` patches, rows [patches, hidden_size], to one row, and maps it to the width of the Thinker. is_merged_first:
    whether they are joined before the norm; if not, after it."""

    def __init__(self, weight: Need, name: str, config: VisionConfig, linear: LinearMaker, *, is_merged_first: bool) -> None:
        self._width, self._is_merged_first = config.unit * config.hidden_size, is_merged_first
        self._norm = LayerNorm.of(weight, f"{name}.ln_q", NORM_EPS)
        self._first, self._second = (_product(weight, f"{name}.mlp.{index}", linear) for index in (0, 2))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        normed = self._norm(x.view(-1, self._width)) if self._is_merged_first else self._norm(x).view(-1, self._width)
        return self._second(functional.gelu(self._first(normed)))


def _product(weight: Need, name: str, linear: LinearMaker) -> Linear:
    return linear(weight(f"{name}.weight"), weight(f"{name}.bias"))
