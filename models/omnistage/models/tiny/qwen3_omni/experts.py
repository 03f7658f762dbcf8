"""Weights of experts in the form of the published files."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def experts_apart(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Split weights that Transformers 5 keeps for all experts of a layer, [experts, rows, columns], into one for each; the rest stays."""
    tensors: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        experts, _, part = name.rpartition(".")
        if part == "gate_up_proj":
            for number, pair in enumerate(value):
                gate, up = pair.chunk(2)
                tensors |= {f"{experts}.{number}.gate_proj.weight": gate, f"{experts}.{number}.up_proj.weight": up}
        elif part == "down_proj":
            tensors |= {f"{experts}.{number}.down_proj.weight": down for number, down in enumerate(value)}
        else:
            tensors[name] = value
    return tensors
