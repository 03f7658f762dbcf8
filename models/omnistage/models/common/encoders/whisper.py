"""Parts of Whisper (Radford et al. 2022) that sound encoders use: its layers and its table of positions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as functional

from omnistage.engine.linear import Linear, LinearMaker
from omnistage.models.common.encoders.encoder import Need
from omnistage.models.common.encoders.segments import Segments

LONGEST_WAVE = 10000.0
NORM_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """A layer norm with weight and bias, both [width]; called with rows [rows, width]."""

    weight: torch.Tensor
    bias: torch.Tensor
    eps: float = NORM_EPS

    @classmethod
    def of(cls, weight: Need, name: str, eps: float = NORM_EPS) -> Self:
        return cls(weight(f"{name}.weight").clone(), weight(f"{name}.bias").clone(), eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class WhisperLayer:
    """One layer of an encoder. weight: returns a weight by its name in Transformers. name: beginning of the names of its weights. heads:
    number of attention heads. has_key_bias: whether the product of keys has a bias."""

    def __init__(self, weight: Need, name: str, heads: int, linear: LinearMaker, *, has_key_bias: bool) -> None:
        attention = f"{name}.self_attn"
        queries, values = weight(f"{attention}.q_proj.bias"), weight(f"{attention}.v_proj.bias")
        keys = weight(f"{attention}.k_proj.bias") if has_key_bias else torch.zeros_like(queries)
        self._heads = heads
        self._attention_norm = LayerNorm.of(weight, f"{name}.self_attn_layer_norm")
        self._query_key_value = linear(
            torch.cat([weight(f"{attention}.{part}_proj.weight") for part in "qkv"]), torch.cat((queries, keys, values))
        )
        self._output = _product(weight, f"{attention}.out_proj", linear)
        self._ffn_norm = LayerNorm.of(weight, f"{name}.final_layer_norm")
        self._up, self._down = (_product(weight, f"{name}.{part}", linear) for part in ("fc1", "fc2"))

    def __call__(self, x: torch.Tensor, segments: Segments) -> torch.Tensor:
        """Apply the layer. x: [rows, width]; the result too. segments: which rows see each other."""
        query, key, value = self._query_key_value(self._attention_norm(x)).view(len(x), 3, self._heads, -1).unbind(1)
        x = x + self._output(segments.attention(query, key, value))
        return x + self._down(functional.gelu(self._up(self._ffn_norm(x))))


def _product(weight: Need, name: str, linear: LinearMaker) -> Linear:
    return linear(weight(f"{name}.weight"), weight(f"{name}.bias"))


def sinusoids(length: int, width: int) -> torch.Tensor:
    """The table of positions as in Vaswani et al. 2017, sines first, then cosines, float32 [length, width]."""
    half = width // 2
    scales = torch.exp(-math.log(LONGEST_WAVE) / (half - 1) * torch.arange(half, dtype=torch.float32))
    angles = torch.arange(length, dtype=torch.float32)[:, None] * scales
    return torch.cat((angles.sin(), angles.cos()), 1)
