"""Norms of hidden rows, and of queries and keys. Each is computed row by row."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as functional

from omnistage.engine.materials import Materials

Norm = Callable[[torch.Tensor], torch.Tensor]
"""Maps [rows, hidden_size] to the same shape."""

HeadNorm = Callable[[torch.Tensor], None]
"""Normalizes queries and keys in place, before positions are applied. Its argument has queries, keys and values: [rows, query_heads + 2 *
kv_heads, head_size]."""


def rms_norm(materials: Materials, name: str) -> Norm:
    """Build an RMS norm (Zhang and Sennrich 2019). name: the name of its weight without ".weight"."""
    config = materials.config
    weight, shape, eps = materials.need(f"{name}.weight", (config.hidden_size,)).clone(), (config.hidden_size,), config.norm_eps
    return lambda x: functional.rms_norm(x, shape, weight, eps)


def head_rms_norm(materials: Materials, layer: int) -> HeadNorm:
    """Build the RMS norms of each head's queries and keys (Dehghani et al. 2023), with weights that all heads share."""
    config, prefix = materials.config, f"layers.{layer}.self_attn"
    queries, keys = (materials.need(f"{prefix}.{name}.weight", (config.head_size,)) for name in ("q_norm", "k_norm"))
    weights = torch.cat((queries.expand(config.query_heads, -1), keys.expand(config.kv_heads, -1)))
    shape, eps = (config.head_size,), config.norm_eps

    def norm(heads: torch.Tensor) -> None:
        asking = heads[:, : len(weights)]
        asking.copy_(functional.rms_norm(asking, shape, None, eps).mul_(weights))

    return norm
