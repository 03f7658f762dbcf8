"""A lean dense decoder: the layer of Llama, Qwen2 and, with norms of queries and keys, Qwen3.

The layer of Vaswani et al. with RMS norm (Zhang and Sennrich 2019), rotary positions (Su et al. 2021), grouped queries (Ainslie et
al. 2023) and SwiGLU (Shazeer 2020), as in Transformers' `Qwen2_5OmniDecoderLayer` for text. Query, key and value weights are one
matrix, gate and up another, and all are packed: about 0.6 of the time of the same layers run as Transformers' modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as functional

from omnistage.engine.adapter import Attention, DecoderSpec, Hidden, StepRows
from omnistage.engine.group import ALONE, Group
from omnistage.engine.linear import Linear, Linears, build_exact

EMBEDDING = "embed_tokens.weight"
LM_HEAD = "lm_head.weight"

Weights = Callable[[str], torch.Tensor | None]
"""The tensor of a name, None if there is none."""

Enter = Callable[[StepRows, torch.Tensor], torch.Tensor]
"""Makes what the first layer takes, [rows, hidden_size], of the rows of a step and the embeddings of their items, [rows, width]. What
becomes of a row does not depend on the others."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes and constants of a `PackedDecoder`.

    head_size: 0: hidden_size / query_heads. head_norms: queries and keys have RMS norms of their own, as in Qwen3. rope_sections: pairs of
    components of a head that turn by the first, second, third axis of positions, as in Qwen2.5-Omni; none: there is one axis. taps: a tap
    is the last hidden row plus the embedding of the row's item, without it where a vector was given, as Qwen2.5-Omni's Talker takes it.
    given_width: of a vector that is given for a row; 0: hidden_size.
    """

    layers: int
    hidden_size: int
    ffn_size: int
    query_heads: int
    kv_heads: int
    vocab_size: int
    context: int
    norm_eps: float
    rope_theta: float
    taps: bool = False
    head_size: int = 0
    head_norms: bool = False
    rope_sections: tuple[int, ...] = ()
    given_width: int = 0

    def __post_init__(self) -> None:
        if not self.head_size:
            object.__setattr__(self, "head_size", self.hidden_size // self.query_heads)
        if self.rope_sections and 2 * sum(self.rope_sections) != self.head_size:
            raise ValueError(f"rope_sections {self.rope_sections} are pairs of components, {self.head_size // 2} together")


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: torch.Tensor
    query_key_value: Linear
    head_norms: torch.Tensor | None  # [query_heads + kv_heads, head_size]
    output: Linear
    ffn_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class PackedDecoder:
    """Implements `Decoder` over plain weights.

    weight: returns the tensor of a name ("embed_tokens.weight", "norm.weight", "layers.N.self_attn.q_proj.weight" ...), in the names
    of Transformers' text model. The embedding is kept as it comes, and may be memory of a file; all others are copied. An absent bias is
    None. The logits use the embedding ("tied") unless a weight "lm_head.weight" exists.
    entry: how rows enter the first layer, made with the decoder's own products: by default a given vector stands in the place of the
    embedding. products: the backend of its products, and why a faster one was refused.
    group: ranks that compute it together. config and weights are then those of this rank's part, heads and columns of the FFN, with a
    weight "lm_head.weight" for its part of the logits; all ranks call `hidden` and `logits` alike, and each has the whole of both.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weight: Weights,
        entry: Callable[[Linears], Enter] = lambda linear: in_place,
        group: Group = ALONE,
    ) -> None:
        embedding = _need(weight, EMBEDDING, (config.vocab_size, config.given_width or config.hidden_size))
        self._config, self._embedding, self._group = config, embedding, group
        self._norm = _need(weight, "norm.weight", (config.hidden_size,)).clone()
        head = weight(LM_HEAD)

        def build(linear: Linears) -> tuple[tuple[_Layer, ...], Linear, Enter]:
            layers = tuple(_layer(weight, f"layers.{index}", config, linear) for index in range(config.layers))
            return layers, linear(embedding if head is None else head), entry(linear)

        (self._layers, self._head, self._enter), self.products = build_exact(build, embedding.dtype, embedding.device)
        self._spec = DecoderSpec(
            layers=config.layers,
            query_heads=config.query_heads,
            kv_heads=config.kv_heads,
            head_size=config.head_size,
            item_ids=config.vocab_size,
            context=config.context,
            dtype=self._embedding.dtype,
            axes=len(config.rope_sections) or 1,
            given_width=config.given_width or config.hidden_size,
            tap_width=config.hidden_size if config.taps else 0,
            device=embedding.device,
            drawn_ids=len(embedding if head is None else head) * group.size,
        )
        table = rotary_table(config.context, config.head_size, config.rope_theta, embedding.dtype)
        self._cos, self._sin = (values.to(embedding.device) for values in table)
        axes = torch.arange(len(config.rope_sections), device=embedding.device)
        self._axis_of_component = axes.repeat_interleave(torch.tensor(config.rope_sections, dtype=torch.int64, device=axes.device)).repeat(
            2
        )
        self._components = torch.arange(config.head_size, device=axes.device)

    @property
    def spec(self) -> DecoderSpec:
        return self._spec

    def hidden(self, rows: StepRows, attention: Attention) -> Hidden:
        config = self._config
        heads, width, half = config.query_heads, config.hidden_size, config.head_size // 2
        cos, sin = self._turn(rows.positions)
        embedded = functional.embedding(rows.items[:, 0], self._embedding)
        x = self._enter(rows, embedded)
        for index, layer in enumerate(self._layers):
            normed = functional.rms_norm(x, (width,), layer.attention_norm, config.norm_eps)
            qkv = layer.query_key_value(normed).view(x.shape[0], -1, config.head_size)
            if layer.head_norms is not None:
                asking = qkv[:, : len(layer.head_norms)]
                asking.copy_(functional.rms_norm(asking, (config.head_size,), None, config.norm_eps).mul_(layer.head_norms))
            rolled = qkv.roll(half, -1)
            qkv.mul_(cos).addcmul_(rolled, sin)
            attended = attention(index, qkv[:, :heads], qkv[:, heads:])
            x = x + self._group.all_reduce(layer.output(attended))
            gate, up = layer.gate_up(functional.rms_norm(x, (width,), layer.ffn_norm, config.norm_eps)).chunk(2, -1)
            x = x + self._group.all_reduce(layer.down(functional.silu(gate) * up))
        last = functional.rms_norm(x, (width,), self._norm, config.norm_eps)
        if not rows.taps:
            return Hidden(last)
        return Hidden(last, last + (embedded if rows.has_given is None else embedded.masked_fill(rows.has_given, 0.0)))

    def _turn(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What heads and their rolled components are multiplied by: queries turn and are scaled, keys turn, values stay.

        positions: [axes, rows]. Returns [rows, query_heads + 2 * kv_heads, head_size] each.
        """
        heads, kv_heads, scale = self._config.query_heads, self._config.kv_heads, self._config.head_size**-0.5
        cos, sin = (self._by_axis(table[positions[: self._spec.axes]]) for table in (self._cos, self._sin))
        cosines = (cos.mul(scale).expand(-1, heads, -1), cos.expand(-1, kv_heads, -1), torch.ones_like(cos).expand(-1, kv_heads, -1))
        sines = (sin.mul(scale).expand(-1, heads, -1), sin.expand(-1, kv_heads, -1), torch.zeros_like(sin).expand(-1, kv_heads, -1))
        return torch.cat(cosines, 1), torch.cat(sines, 1)

    def _by_axis(self, values: torch.Tensor) -> torch.Tensor:
        """Of values for each axis those of the axis that each component turns by. [axes, rows, 1, head_size] to [rows, 1, head_size]."""
        if values.shape[0] == 1:
            return values[0]
        return values[self._axis_of_component, :, 0, self._components].t()[:, None]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._group.all_gather(self._head(hidden))


def in_place(rows: StepRows, embedded: torch.Tensor) -> torch.Tensor:
    """A given vector stands in the place of the embedding, as those of media in a Thinker."""
    if rows.given is None or rows.has_given is None:
        return embedded
    return torch.where(rows.has_given, rows.given, embedded)


def _need(weight: Weights, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Raises ValueError for a weight that is missing or misshapen, before anything is made of the sizes that it should have."""
    tensor = weight(name)
    if tensor is None:
        raise ValueError(f"the checkpoint has no weight {name!r}")
    if tensor.shape != shape:
        raise ValueError(f"the weight {name!r} is {list(tensor.shape)}, and by the config it is {list(shape)}")
    return tensor


def _layer(weight: Weights, prefix: str, config: DecoderConfig, linear: Linears) -> _Layer:
    hidden, ffn, size = config.hidden_size, config.ffn_size, config.head_size
    queries, keys = config.query_heads * size, config.kv_heads * size
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    return _Layer(
        head_norms=_head_norms(weight, attention, config) if config.head_norms else None,
        attention_norm=_need(weight, f"{prefix}.input_layernorm.weight", (hidden,)).clone(),
        query_key_value=_fused(weight, attention, {"q_proj": queries, "k_proj": keys, "v_proj": keys}, hidden, linear),
        output=_fused(weight, attention, {"o_proj": hidden}, queries, linear),
        ffn_norm=_need(weight, f"{prefix}.post_attention_layernorm.weight", (hidden,)).clone(),
        gate_up=_fused(weight, mlp, {"gate_proj": ffn, "up_proj": ffn}, hidden, linear),
        down=_fused(weight, mlp, {"down_proj": hidden}, ffn, linear),
    )


def _head_norms(weight: Weights, prefix: str, config: DecoderConfig) -> torch.Tensor:
    queries, keys = (_need(weight, f"{prefix}.{name}.weight", (config.head_size,)) for name in ("q_norm", "k_norm"))
    return torch.cat((queries.expand(config.query_heads, -1), keys.expand(config.kv_heads, -1)))


def _fused(weight: Weights, prefix: str, sizes: Mapping[str, int], width: int, linear: Linears) -> Linear:
    """sizes: of what comes out, by the name of each weight. width: of what goes in."""
    matrix = torch.cat([_need(weight, f"{prefix}.{name}.weight", (size, width)) for name, size in sizes.items()])
    biases = [bias for bias in (weight(f"{prefix}.{name}.bias") for name in sizes) if bias is not None]
    if biases and len(biases) != len(sizes):
        raise ValueError(f"the checkpoint has a bias for only some of {prefix}.{tuple(sizes)}")
    bias = torch.cat(biases) if biases else None
    return linear(matrix, bias if bias is not None and bool(bias.any()) else None)


def rotary_table(context: int, head_size: int, theta: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the rotary angles, both [context, 1, head_size].

    Component i of the first half turns with component i of the second. The sines of the first half are negative, so that
    `x * cos + roll(x, half) * sin` is Transformers' `x * cos + rotate_half(x) * sin`. Angles are computed in float32 as there.
    """
    frequencies = 1.0 / (theta ** (torch.arange(0, head_size, 2, dtype=torch.float32) / head_size))
    angles = torch.arange(context, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).to(dtype)[:, None], torch.cat((-sin, sin), -1).to(dtype)[:, None]
