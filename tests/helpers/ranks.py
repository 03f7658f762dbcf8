"""A small random decoder with more heads than that of a tiny checkpoint, in parts; read by the processes of other ranks, too."""

from __future__ import annotations

from pathlib import Path

import torch

from omnistage.engine.decoder import DecoderParts, PackedDecoder, last_and_embedding
from omnistage.engine.devices import Group
from omnistage.engine.parts import DecoderConfig
from omnistage.models.checkpoint.decoder import config_of_part, weights_of_part
from omnistage.models.options import LoadOptions

READER = "helpers.ranks:read_random"
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
