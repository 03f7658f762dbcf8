"""Small random decoders, whole and in parts for ranks, and requests for them: one of other parts than those of `tiny`, and one with more
heads, which processes of other ranks read, too."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from omnistage.engine.decoder import DecoderParts, PackedDecoder, Tap, deepstack, last_and_embedding
from omnistage.engine.devices import ONE_RANK, Group
from omnistage.engine.parts import DecoderConfig, ExpertSizes, Materials, experts, head_rms_norm, interleaved_axes, rotary
from omnistage.engine.request import Given, Prompt, SequenceRequest
from omnistage.engine.types import Sampling
from omnistage.models.checkpoint.decoder import config_of_part, weights_of_part
from omnistage.models.options import LoadOptions

READER = "helpers.parts:read_toy"
EXPERTS = ExpertSizes(experts=7, experts_per_row=3, size=36, normalized=True, shared=44)
SECTIONS = (5, 4, 3)
STACKED = 2
"""Layers behind which a part of a given vector is added."""


def last_rows(materials: Materials) -> Tap:
    """The last hidden rows as they are, to be looked at."""
    return Tap(materials.config.hidden_size, lambda rows, embedded, hidden: hidden)


@dataclass(frozen=True)
class ToyPart:
    """plan: how its weights are cut for ranks. cut: what of it, see `config_of_part`. prompt: one of so many tokens."""

    config: DecoderConfig
    parts: DecoderParts
    shapes: dict[str, tuple[int, ...]]
    plan: dict[str, str]
    cut: dict[str, int] | None
    prompt: Callable[[int, random.Random], Prompt]

    def weights(self, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        made = {}
        for name, shape in self.shapes.items():
            values = torch.randn(shape, generator=generator)
            if "norm" in name and name.endswith("weight"):
                values = 1 + values * 0.1
            elif not name.startswith("embed"):
                values *= 1.5 * shape[-1] ** -0.5
            made[name] = values.to(dtype)
        return made

    def decoder(self, seed: int, dtype: torch.dtype = torch.float32, group: Group = ONE_RANK) -> PackedDecoder:
        weight = self.weights(seed, dtype).get
        if group.size == 1:
            return PackedDecoder(self.config, weight, self.parts)
        config = config_of_part(self.config, group.size, self.cut)
        return PackedDecoder(config, weights_of_part(weight, self.plan, group), self.parts, group)


def read_toy(folder: Path, options: LoadOptions, group: Group) -> PackedDecoder:
    """A `rank.RankReader`. options.family: the seed."""
    return MIX.decoder(int(options.family["seed"]), getattr(torch, options.dtype), group)


MIXED = DecoderConfig(
    layers=3,
    hidden_size=100,
    ffn_size=60,
    query_heads=6,
    kv_heads=2,
    vocab_size=218,
    context=300,
    norm_eps=1e-6,
    head_size=24,
    given_width=(1 + STACKED) * 100,
)


def mixed_shapes(sizes: ExpertSizes = EXPERTS) -> dict[str, tuple[int, ...]]:
    hidden, queries, keys = MIXED.hidden_size, MIXED.query_heads * MIXED.head_size, MIXED.kv_heads * MIXED.head_size
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (MIXED.vocab_size, hidden), "norm.weight": (hidden,)}
    for layer in (f"layers.{layer}" for layer in range(MIXED.layers)):
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        shapes |= {f"{attention}.{name}_proj.weight": (queries if name == "q" else keys, hidden) for name in "qkv"}
        shapes |= {f"{attention}.o_proj.weight": (hidden, queries), f"{mlp}.gate.weight": (sizes.experts, hidden)}
        shapes |= {f"{attention}.{name}_norm.weight": (MIXED.head_size,) for name in "qk"}
        shapes |= {f"{layer}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        gated = {f"{mlp}.experts.{expert}": sizes.size for expert in range(sizes.experts)}
        if sizes.shared:
            gated |= {f"{mlp}.shared_expert": sizes.shared}
            shapes[f"{mlp}.shared_expert_gate.weight"] = (1, hidden)
        for expert, size in gated.items():
            shapes |= {f"{expert}.{name}_proj.weight": (size, hidden) for name in ("gate", "up")}
            shapes[f"{expert}.down_proj.weight"] = (hidden, size)
    return shapes


def mixed_prompt(tokens: int, rng: random.Random) -> Prompt:
    """A part of it is a picture, if there is room for one: given vectors, at positions of their own on three axes."""
    ids, number, first = [rng.randrange(MIXED.vocab_size) for _ in range(tokens)], rng.getrandbits(31), tokens // 3
    rows = min(9, tokens - first - 1)
    if rows < 1:
        return Prompt.of_tokens(ids)
    vectors = torch.randn(rows, MIXED.given_width, generator=torch.Generator().manual_seed(number))
    positions = np.arange(tokens)[None].repeat(3, 0)
    positions[:, first : first + rows] = first + np.array([[0] * rows, [row // 3 for row in range(rows)], [row % 3 for row in range(rows)]])
    positions[:, first + rows :] += 3 - rows
    return replace(
        Prompt.of_tokens(ids), given=(Given(first, vectors, b"%d" % number),), positions=positions, delta=int(positions.max()) + 1 - tokens
    )


MIX = ToyPart(
    MIXED,
    DecoderParts(
        rope=rotary(5000.0, interleaved_axes(SECTIONS)),
        head_norm=head_rms_norm,
        feed_forward=experts(EXPERTS),
        after=deepstack(STACKED),
        tap=last_rows,
    ),
    mixed_shapes(),
    {
        **{f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
        "layers.*.self_attn.o_proj": "rowwise",
        "lm_head": "colwise_gather_output",
        "layers.*.mlp.experts.gate_up_proj": "grouped_gemm",
        "layers.*.mlp.experts.down_proj": "grouped_gemm",
        "layers.*.mlp.experts": "ep_dispatch_experts",
        "layers.*.mlp.shared_expert.gate_proj": "colwise",
        "layers.*.mlp.shared_expert.up_proj": "colwise",
        "layers.*.mlp.shared_expert.down_proj": "rowwise",
    },
    EXPERTS.divided_sizes,
    mixed_prompt,
)


def requests(toy: ToyPart, seed: int, lengths: tuple[int, ...], items: int, sampling: Sampling | None = None) -> list[SequenceRequest]:
    """One for each length of a prompt, with all taps."""
    rng = random.Random(seed)
    return [
        SequenceRequest(toy.prompt(length, rng), seed + number, items, sampling or Sampling(), taps_from=0)
        for number, length in enumerate(lengths)
    ]


RANDOM_READER = "helpers.parts:read_random"
CONFIG = DecoderConfig(
    layers=3, hidden_size=64, ffn_size=96, query_heads=8, kv_heads=4, vocab_size=320, context=512, norm_eps=1e-6, head_size=16
)
TAPPED = DecoderParts(tap=last_and_embedding)
PLAN = {
    **{f"layers.*.{name}_proj": "colwise" for name in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up")},
    **{f"layers.*.{name}_proj": "rowwise" for name in ("self_attn.o", "mlp.down")},
    "lm_head": "colwise_gather_output",
}


def read_random(folder: Path, options: LoadOptions, group: Group) -> PackedDecoder:
    """A `rank.RankReader`. options.family: the seed, whether it is tied, and the dtype."""
    dtype = getattr(torch, options.dtype)
    whole = random_weights(int(options.family["seed"]), dtype)
    if options.family.get("tied"):
        del whole["lm_head.weight"]
    if group.size == 1:
        return PackedDecoder(CONFIG, whole.get, TAPPED)
    return PackedDecoder(config_of_part(CONFIG, group.size), weights_of_part(whole.get, PLAN, group), TAPPED, group)


def random_weights(seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Every bias is there, also of the products whose results are added up."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int, scale: float) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    width, ffn = CONFIG.hidden_size, CONFIG.ffn_size
    queries, keys = CONFIG.query_heads * CONFIG.head_size, CONFIG.kv_heads * CONFIG.head_size
    weights = {"embed_tokens.weight": drawn(CONFIG.vocab_size, width, scale=1.0), "norm.weight": 1 + drawn(width, scale=0.1)}
    weights["lm_head.weight"] = drawn(CONFIG.vocab_size, width, scale=0.3)
    products = {
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "mlp.gate_proj": (ffn, width),
        "mlp.up_proj": (ffn, width),
        "mlp.down_proj": (width, ffn),
    }
    for layer in range(CONFIG.layers):
        for name, shape in products.items():
            weights[f"layers.{layer}.{name}.weight"] = drawn(*shape, scale=shape[1] ** -0.5)
            weights[f"layers.{layer}.{name}.bias"] = drawn(shape[0], scale=0.3)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"layers.{layer}.{name}.weight"] = 1 + drawn(width, scale=0.1)
    return weights
