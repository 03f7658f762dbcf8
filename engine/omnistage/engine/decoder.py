"""A lean dense decoder (the Llama and Qwen2 layer) for the CPU.

The layer of Vaswani et al. with RMS norm (Zhang and Sennrich 2019), rotary positions (Su et al. 2021), grouped queries (Ainslie et
al. 2023) and SwiGLU (Shazeer 2020), as in Transformers' `Qwen2_5OmniDecoderLayer` for text. Query, key and value weights are one
matrix, gate and up another, and all are packed: about 0.6 of the time of the same layers run as Transformers' modules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as functional

from omnistage.engine.adapter import Attention, DecoderSpec
from omnistage.engine.linear import Linear


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes and constants of a `PackedDecoder`."""

    layers: int
    hidden_size: int
    ffn_size: int
    query_heads: int
    kv_heads: int
    vocab_size: int
    context: int
    norm_eps: float
    rope_theta: float

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.query_heads


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: torch.Tensor
    query_key_value: Linear
    output: Linear
    ffn_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class PackedDecoder:
    """Implements `Decoder` over plain weights.

    weight: returns the tensor of a name ("embed_tokens.weight", "norm.weight", "layers.N.self_attn.q_proj.weight" ...), in the names
    of Transformers' text model. An absent bias is None. The logits use the embedding ("tied") unless a weight "lm_head.weight" exists.
    """

    def __init__(self, config: DecoderConfig, weight: Callable[[str], torch.Tensor | None]) -> None:
        def need(name: str) -> torch.Tensor:
            tensor = weight(name)
            if tensor is None:
                raise ValueError(f"the checkpoint has no weight {name!r}")
            return tensor

        def fused(prefix: str, names: tuple[str, ...]) -> Linear:
            matrix = torch.cat([need(f"{prefix}.{name}.weight") for name in names])
            biases = [bias for bias in (weight(f"{prefix}.{name}.bias") for name in names) if bias is not None]
            if biases and len(biases) != len(names):
                raise ValueError(f"the checkpoint has a bias for only some of {prefix}.{names}")
            bias = torch.cat(biases) if biases else None
            return Linear(matrix, bias if bias is not None and bool(bias.any()) else None)

        self._config = config
        self._embedding = need("embed_tokens.weight").clone()
        self._norm = need("norm.weight").clone()
        self._layers = tuple(
            _Layer(
                attention_norm=need(f"layers.{index}.input_layernorm.weight").clone(),
                query_key_value=fused(f"layers.{index}.self_attn", ("q_proj", "k_proj", "v_proj")),
                output=fused(f"layers.{index}.self_attn", ("o_proj",)),
                ffn_norm=need(f"layers.{index}.post_attention_layernorm.weight").clone(),
                gate_up=fused(f"layers.{index}.mlp", ("gate_proj", "up_proj")),
                down=fused(f"layers.{index}.mlp", ("down_proj",)),
            )
            for index in range(config.layers)
        )
        head = weight("lm_head.weight")
        self._head = Linear(self._embedding if head is None else head)
        self._spec = DecoderSpec(
            layers=config.layers,
            query_heads=config.query_heads,
            kv_heads=config.kv_heads,
            head_size=config.head_size,
            vocab_size=config.vocab_size,
            context=config.context,
            dtype=self._embedding.dtype,
        )
        self._cos, self._sin = rotary_table(config.context, config.head_size, config.rope_theta, self._embedding.dtype)

    @property
    def spec(self) -> DecoderSpec:
        return self._spec

    def hidden(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        config = self._config
        heads, rotated, width = config.query_heads, config.query_heads + config.kv_heads, config.hidden_size
        cos, sin = self._cos[positions], self._sin[positions]
        scale, half = config.head_size**-0.5, config.head_size // 2
        x = functional.embedding(token_ids, self._embedding)
        for index, layer in enumerate(self._layers):
            normed = functional.rms_norm(x, (width,), layer.attention_norm, config.norm_eps)
            qkv = layer.query_key_value(normed).view(x.shape[0], -1, config.head_size)
            turning = qkv[:, :rotated]
            turning.copy_(torch.addcmul(turning * cos, turning.roll(half, -1), sin))
            attended = attention(index, qkv[:, :heads] * scale, qkv[:, heads:])
            x = x + layer.output(attended)
            gate, up = layer.gate_up(functional.rms_norm(x, (width,), layer.ffn_norm, config.norm_eps)).chunk(2, -1)
            x = x + layer.down(functional.silu(gate) * up)
        return functional.rms_norm(x, (width,), self._norm, config.norm_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(hidden)


def rotary_table(context: int, head_size: int, theta: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the rotary angles, both [context, 1, head_size].

    Component i of the first half turns with component i of the second. The sines of the first half are negative, so that
    `x * cos + roll(x, half) * sin` is Transformers' `x * cos + rotate_half(x) * sin`. Angles are computed in float32 as there.
    """
    frequencies = 1.0 / (theta ** (torch.arange(0, head_size, 2, dtype=torch.float32) / head_size))
    angles = torch.arange(context, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).to(dtype)[:, None], torch.cat((-sin, sin), -1).to(dtype)[:, None]
