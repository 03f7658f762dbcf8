"""A feed-forward of experts: each row goes to a few of them (Shazeer et al. 2017, Fedus et al. 2022).

All rows are gathered once, so that the rows of an expert lie together. They go through its products in numbers of rows that do not change
their bits (`engine.linear`). The results of a row's experts are added up in the order of the experts. So the bits of a row do not depend on
which other rows chose the same expert. A step costs two products for each expert that some row chose, and a few operations, however many
experts there are; padding chooses none. Each rank has some whole experts and adds up their results; then the sums of all ranks are added
up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from operator import sub

import torch
import torch.nn.functional as functional

from omnistage.engine.adapter import StepRows
from omnistage.engine.feed_forward import FeedForward, apply_gate, by_rows, gated_product
from omnistage.engine.group import Group
from omnistage.engine.linear import pad_rows
from omnistage.engine.materials import Materials

_GATES = 32
"""Number of equal columns in which the shared expert's gate is computed; `feed_forward._COLUMNS` says why."""


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """Sizes of a feed-forward of experts. experts: number of experts. chosen: number of experts for one row. size: columns of an expert.
    normalized: whether the weights of the chosen experts add up to 1. shared: columns, in all ranks together, of an expert that every row
    goes through, weighed by a gate of its own; 0: there is none."""

    experts: int
    chosen: int
    size: int
    normalized: bool
    shared: int = 0

    @property
    def cut(self) -> dict[str, int]:
        """The sizes that the number of ranks must divide, by their names for an error: see `config_of_part`. It need not divide the number
        of experts: one rank may have one more."""
        return {"columns of the shared expert": self.shared} if self.shared else {}

    def of_rank(self, group: Group) -> range:
        """Numbers of the experts that a rank has: every `group.size`-th expert, beginning with number `group.rank`."""
        return range(group.rank, self.experts, group.size)


def experts(sizes: ExpertSizes) -> Callable[[Materials, int], FeedForward]:
    """A function that builds a layer's experts on this rank: some of the experts, some columns of the shared expert, and the whole
    router."""
    if not 0 < sizes.chosen <= sizes.experts:
        raise ValueError(f"a row cannot be given to {sizes.chosen} of {sizes.experts} experts")
    return lambda materials, layer: Experts(materials, f"layers.{layer}.mlp", sizes)


class Experts:
    """The experts of one layer on this rank; implements `FeedForward`. prefix: beginning of the names of its weights, which end in
    "gate.weight" (the router), "experts.N.gate_proj.weight" ..., and "shared_expert.gate_proj.weight" ... with
    "shared_expert_gate.weight"."""

    def __init__(self, materials: Materials, prefix: str, sizes: ExpertSizes) -> None:
        hidden, ranks = materials.config.hidden_size, materials.group.size
        self._sizes, self._group = sizes, materials.group
        self._router = materials.fuse(prefix, {"gate": sizes.experts}, hidden)
        rank_experts = sizes.of_rank(materials.group)
        self._experts = tuple(gated_product(materials, f"{prefix}.experts.{expert}", sizes.size) for expert in rank_experts)
        self._number = torch.full((sizes.experts,), len(rank_experts), device=materials.device)
        """The number of each expert among those of this rank; for all experts of other ranks, the number after the last."""
        self._number[list(rank_experts)] = torch.arange(len(rank_experts), device=materials.device)
        if sizes.shared:
            self._shared = gated_product(materials, f"{prefix}.shared_expert", sizes.shared // ranks)
            gate = materials.need(f"{prefix}.shared_expert_gate.weight", (1, hidden))
            self._shared_gate = materials.linear(gate.expand(_GATES, -1).contiguous())

    def __call__(self, rows: StepRows, x: torch.Tensor) -> torch.Tensor:
        """See FeedForward. Padding goes to the shared expert only."""
        rows_in = x[: len(x) - rows.padding]
        total = functional.pad(self._sum(rows_in, *self._route(rows_in)), (0, 0, 0, rows.padding))
        if self._sizes.shared:
            total += by_rows(torch.sigmoid, self._shared_gate(x))[:, :1] * self._shared(x)
        return self._group.all_reduce(total)

    def _sum(self, x: torch.Tensor, weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """For each row the sum of its chosen experts' results, times their weights, over the experts of this rank. x: [n, hidden_size].
        weights, numbers: weights and numbers of each row's experts, [n, chosen]."""
        numbers, in_order = numbers.sort(-1)
        places, counts = together(self._number[numbers], len(self._experts))
        in_use = [(expert, count) for expert, count in zip(self._experts, counts, strict=True) if count]
        if not in_use:
            return torch.zeros_like(x)
        count, sizes = sum(counts), [count for _, count in in_use]
        gathered = x.new_zeros(count + 1, x.shape[1])
        gathered.index_copy_(0, places.flatten(), x.repeat_interleave(numbers.shape[1], 0))
        parts = torch.split(gathered[:count], sizes)
        between = apply_gate(torch.cat([expert.gate_up(part) for (expert, _), part in zip(in_use, parts, strict=True)]))
        results = [expert.down(part) for (expert, _), part in zip(in_use, torch.split(between, sizes), strict=True)]
        weighed = torch.cat([*results, x.new_zeros(1, x.shape[1])])[places] * weights.gather(1, in_order)[:, :, None]
        # In order: a sum of the library may add in another order if there are more rows.
        return reduce(torch.add, weighed.unbind(1))

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights and the numbers of the experts that each row chooses, [rows, chosen] each."""
        weights, numbers = functional.softmax(self._router(x), -1, dtype=torch.float32).topk(self._sizes.chosen, -1)
        if self._sizes.normalized:
            # In order: a sum of the library may add in another order if there are more rows.
            weights = weights / reduce(torch.add, weights.unbind(-1))[:, None]
        return weights.to(x.dtype), numbers


def together(numbers: torch.Tensor, experts: int) -> tuple[torch.Tensor, list[int]]:
    """Find places that put the rows of each expert next to each other. numbers: the experts of each row, int64 [rows, chosen]; below
    `experts`, or equal to it for an expert of another rank. Returns a place for each entry of `numbers`, in the same shape, and for each
    expert its number of places, which includes padding to the fewest rows of a product. All rows of other ranks' experts share one place
    after all others."""
    flat = numbers.flatten()
    counts = flat.bincount(minlength=experts + 1).tolist()[:experts]
    room = [pad_rows(count) if count else 0 for count in counts]
    # The n-th row in the order of experts goes to place n plus the padding of all experts before its own.
    free = torch.tensor([0, *accumulate(map(sub, room, counts))], device=numbers.device)
    order = flat.argsort(stable=True)
    places = torch.empty_like(flat)
    places[order] = torch.arange(len(flat), device=numbers.device) + free[flat[order]]
    return places.clamp_(max=sum(room)).view_as(numbers), room
