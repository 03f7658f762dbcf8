"""Reads and checks the weights of experts. A published checkpoint stores each expert by itself; Transformers 5 stores all experts of a
layer in one tensor."""

from __future__ import annotations

import torch

from omnistage.engine.devices import ALONE, Group
from omnistage.engine.parts import ExpertSizes
from omnistage.models.common.weights import Weights

_PARTS = {"gate_proj.weight": ("gate_up_proj", 0), "up_proj.weight": ("gate_up_proj", 1), "down_proj.weight": ("down_proj", None)}
"""Name of an expert's weight -> the tensor that has this weight for all experts, and which half of the expert's rows in that tensor it is;
None: all rows."""


def check_experts(weights: Weights, mlp: str, sizes: ExpertSizes, hidden: int, group: Group = ALONE) -> None:
    """Raises BadCheckpoint for a missing or misshapen expert of a layer, of any rank. mlp: beginning of the weights' names. hidden: width
    of a row. group: weights that other ranks read are reported to `weights.leave`. The number of experts that are stored together is
    checked too, because nothing else would notice a surplus expert."""
    shapes = dict.fromkeys(("gate_proj.weight", "up_proj.weight"), (sizes.size, hidden)) | {"down_proj.weight": (hidden, sizes.size)}
    for part, (rows, columns) in shapes.items():
        together, half = _PARTS[part]
        if (every := f"{mlp}.experts.{together}") in weights.header:
            weights.check_shape(every, (sizes.experts, rows if half is None else 2 * rows, columns))
            continue
        for expert in range(sizes.experts):
            weights.check_shape(f"{mlp}.experts.{expert}.{part}", (rows, columns))
        others = set(range(sizes.experts)).difference(sizes.of_rank(group))
        weights.leave(f"{mlp}.experts.{expert}.{part}" for expert in others)


def expert_of_all(weights: Weights, name: str) -> torch.Tensor | None:
    """The weight of one expert, cut out of the tensor of all experts. name: PREFIX.experts.NUMBER.gate_proj.weight and so on, as in
    published checkpoints. None: the name is of another form, or there is no such weight."""
    module, separator, rest = name.rpartition(".experts.")
    number, _, part = rest.partition(".")
    if not separator or not number.isdigit() or part not in _PARTS:
        return None
    together, half = _PARTS[part]
    stored = weights.header.get(every := f"{module}.experts.{together}")
    if stored is None or len(stored.shape) != 3 or int(number) >= stored.shape[0]:
        return None
    expert = weights.read(every, int(number))
    return expert if half is None or expert is None else expert.tensor_split(2)[half]
