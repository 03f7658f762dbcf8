"""A feed-forward of experts, of which each row is given to a few (Shazeer et al. 2017, Fedus et al. 2022).

The rows of an expert are gathered and go through its products as any other rows do, in exact numbers of rows (`engine.linear`); then they
are added to their places, expert by expert in order. So the bits of a row do not depend on which rows chose the same expert. A step costs
two products for each expert that some row chose: padding chooses none. Of several ranks each has some of the experts, and those whole: a
rank adds up what its own make of the rows, and the ranks add up their sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import torch
import torch.nn.functional as functional

from omnistage.engine.adapter import StepRows
from omnistage.engine.feed_forward import FeedForward, by_rows, gated_product
from omnistage.engine.group import Group
from omnistage.engine.materials import Materials

_GATES = 32
"""The gate of the shared expert is computed so often beside itself: see `feed_forward`, where columns are counted."""


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """experts: how many there are. chosen: how many a row is given to. size: columns of an expert. normalized: the weights of the chosen
    ones add up to 1. shared: columns, in all ranks together, of an expert that every row is given to, weighed by a gate of its own; 0:
    there is none."""

    experts: int
    chosen: int
    size: int
    normalized: bool
    shared: int = 0

    @property
    def cut(self) -> dict[str, int]:
        """What must divide evenly among ranks: for `config_of_part`. Experts need not: one rank may have one more than another."""
        return {"columns of the shared expert": self.shared} if self.shared else {}

    def of_rank(self, group: Group) -> range:
        """The experts of a rank, in turns."""
        return range(group.rank, self.experts, group.size)


def experts(sizes: ExpertSizes) -> Callable[[Materials, int], FeedForward]:
    """Builds the experts of a layer. Each rank has some of them, its columns of the shared one, and the whole router."""
    if not 0 < sizes.chosen <= sizes.experts:
        raise ValueError(f"a row cannot be given to {sizes.chosen} of {sizes.experts} experts")
    return lambda materials, layer: Experts(materials, f"layers.{layer}.mlp", sizes)


class Experts:
    """Implements `FeedForward`. prefix: of the names of its weights: "gate.weight" of the router, "experts.N.gate_proj.weight" ..., and
    "shared_expert.gate_proj.weight" ... with "shared_expert_gate.weight"."""

    def __init__(self, materials: Materials, prefix: str, sizes: ExpertSizes) -> None:
        hidden, ranks = materials.config.hidden_size, materials.group.size
        self._sizes, self._group = sizes, materials.group
        self._router = materials.fused(prefix, {"gate": sizes.experts}, hidden)
        self._experts = {
            expert: gated_product(materials, f"{prefix}.experts.{expert}", sizes.size) for expert in sizes.of_rank(materials.group)
        }
        if sizes.shared:
            self._shared = gated_product(materials, f"{prefix}.shared_expert", sizes.shared // ranks)
            gate = materials.need(f"{prefix}.shared_expert_gate.weight", (1, hidden))
            self._shared_gate = materials.linear(gate.expand(_GATES, -1).contiguous())

    def __call__(self, rows: StepRows, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self._route(x[: len(x) - rows.padding])
        total = torch.zeros_like(x)
        for expert in sorted(self._experts.keys() & chosen.flatten().tolist()):
            which, places = (chosen == expert).nonzero(as_tuple=True)
            # No row is there twice, so each place of the sum is written once.
            total.index_add_(0, which, self._experts[expert](x[which]) * weights[which, places, None])
        if self._sizes.shared:
            total += by_rows(torch.sigmoid, self._shared_gate(x))[:, :1] * self._shared(x)
        return self._group.all_reduce(total)

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights of the chosen experts, and which they are, [rows, chosen] each."""
        weights, chosen = functional.softmax(self._router(x), -1, dtype=torch.float32).topk(self._sizes.chosen, -1)
        if self._sizes.normalized:
            # In order: a sum of the library may add in another order where there are more rows.
            weights = weights / reduce(torch.add, weights.unbind(-1))[:, None]
        return weights.to(x.dtype), chosen
