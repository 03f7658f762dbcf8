"""The weights of one expert in a checkpoint that has those of all experts of a layer together, as Transformers 5 computes with them."""

from __future__ import annotations

import torch

from omnistage.models.common.weights import Weights

_PARTS = {"gate_proj.weight": ("gate_up_proj", 0), "up_proj.weight": ("gate_up_proj", 1), "down_proj.weight": ("down_proj", None)}
"""What holds a weight of an expert, and which half of its columns it is."""


def expert_of_all(weights: Weights, name: str) -> torch.Tensor | None:
    """name: of a weight of one expert, as published checkpoints have it: PREFIX.experts.NUMBER.gate_proj.weight and so on. None where it
    is no such name, and where there is no such weight."""
    module, found, rest = name.rpartition(".experts.")
    number, _, part = rest.partition(".")
    if not found or not number.isdigit() or part not in _PARTS:
        return None
    together, half = _PARTS[part]
    stored = weights.header.get(every := f"{module}.experts.{together}")
    if stored is None or len(stored.shape) != 3 or int(number) >= stored.shape[0]:
        return None
    expert = weights.read(every, int(number))
    return expert if half is None or expert is None else expert.tensor_split(2)[half]
