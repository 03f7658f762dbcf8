"""The parts of a decoder that a family chooses from, and the materials that they are built of: sizes, weights, products, and ranks. The
parts are norms, rotary positions (Su et al. 2021) on one axis or several, the gated feed-forward (SwiGLU), and a feed-forward of experts,
where each row goes to a few of them (Shazeer et al. 2017, Fedus et al. 2022). Their promise to a row is in `engine.decoder`: each result
depends on its own row alone. If each rank computes a part of a feed-forward, the parts are summed inside, so the caller gets the whole.

Experts. All rows are gathered once, so that the rows of an expert lie together. They go through its products in numbers of rows that do not
change their bits (`engine.linear`). The results of a row's experts are added up in the order of the experts. So the bits of a row do not
depend on which other rows chose the same expert. A step costs two products for each expert that some row chose, and a few operations,
however many experts there are; padding chooses none. Each rank has some whole experts and adds up their results; then the sums of all ranks
are added up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from operator import sub
from typing import Protocol

import torch
import torch.nn.functional as functional

from omnistage.engine.adapter import StepRows
from omnistage.engine.devices import Group
from omnistage.engine.linear import Linear, Linears, pad_rows

Weights = Callable[[str], torch.Tensor | None]
"""Returns the tensor of a name, or None if there is none."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes and constants of a `PackedDecoder`. Everything else about it is a part: see `decoder.DecoderParts`.

    ffn_size: columns of the feed-forward. context: rows that a sequence may have. head_size: numbers of a head; 0: hidden_size /
    query_heads. embedding_width: width of an item's embedding; 0: hidden_size. codebooks: number of ids in an item; the decoder embeds the
    first id, and `entry` the others. further_ids: the other ids are below this number; 0: vocab_size. given_width: width of a vector that a
    request gives for a row; 0: hidden_size."""

    layers: int
    hidden_size: int
    ffn_size: int
    query_heads: int
    kv_heads: int
    vocab_size: int
    context: int
    norm_eps: float
    head_size: int = 0
    embedding_width: int = 0
    given_width: int = 0
    codebooks: int = 1
    further_ids: int = 0

    def __post_init__(self) -> None:
        defaults = {
            "head_size": self.hidden_size // self.query_heads,
            "embedding_width": self.hidden_size,
            "given_width": self.hidden_size,
            "further_ids": self.vocab_size,
        }
        for name, default in defaults.items():
            if not getattr(self, name):
                object.__setattr__(self, name, default)


@dataclass(frozen=True, slots=True)
class Materials:
    """The materials from which the parts of a decoder are built. config: the sizes of this rank, with its own heads and columns only.
    weight: returns the weights of this rank. linear: makes a product; a part makes all its products with it, so that they are tried out at
    load. group: all ranks. dtype, device: of the decoder. Every method raises ValueError for a weight that is missing or misshapen."""

    config: DecoderConfig
    weight: Weights
    linear: Linears
    group: Group
    dtype: torch.dtype
    device: torch.device

    def need(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return need(self.weight, name, shape)

    def fuse(self, prefix: str, sizes: Mapping[str, int], width: int) -> Linear:
        """One product of several weights, joined along their outputs. prefix, sizes: the weights are prefix.name.weight, [size, width], for
        each name and size of `sizes`. width: numbers of an input row."""
        matrix = torch.cat([self.need(f"{prefix}.{name}.weight", (size, width)) for name, size in sizes.items()])
        return self.linear(matrix, self.fused_bias(prefix, sizes))

    def fused_bias(self, prefix: str, sizes: Mapping[str, int]) -> torch.Tensor | None:
        """The biases of several weights, joined; None if there are none, or if all numbers are zero. sizes: as in `fuse`."""
        biases = {name: bias for name in sizes if (bias := self.weight(f"{prefix}.{name}.bias")) is not None}
        if not biases:
            return None
        if len(biases) != len(sizes):
            raise ValueError(f"the checkpoint has a bias for only some of {prefix}.{tuple(sizes)}")
        for name, bias in biases.items():
            _check_shape(f"{prefix}.{name}.bias", bias, (sizes[name],))
        bias = torch.cat([*biases.values()])
        return bias if bool(bias.any()) else None


def need(weight: Weights, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The weight of this name. Raises ValueError if it is missing or has another shape, before the caller allocates memory of the expected
    size."""
    tensor = weight(name)
    if tensor is None:
        raise ValueError(f"the checkpoint has no weight {name!r}")
    _check_shape(name, tensor, shape)
    return tensor


def _check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ValueError(f"the weight {name!r} is {list(tensor.shape)}, and by the config it is {list(shape)}")


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
        queries_keys = heads[:, : len(weights)]  # The values after them stay.
        queries_keys.copy_(functional.rms_norm(queries_keys, shape, None, eps).mul_(weights))

    return norm


Turn = Callable[[torch.Tensor], None]
"""Changes the heads of a layer in place, [rows, query_heads + 2 * kv_heads, head_size]: queries turn and are scaled by 1/sqrt(head_size),
keys turn, values stay."""


class Rope(Protocol):
    """Applies positions to queries and keys."""

    @property
    def axes(self) -> int:
        """Number of axes of a row's position."""

    def __call__(self, positions: torch.Tensor) -> Turn:
        """The function that turns the heads of these rows. positions: int64 [axes, rows]."""


def contiguous_axes(sections: Sequence[int]) -> tuple[int, ...]:
    """The number of the axis of each pair of components: the first pairs belong to axis 0, the next pairs to axis 1, and so on (Wang et al.
    2024). sections: number of pairs of each axis."""
    return tuple(axis for axis, count in enumerate(sections) for _ in range(count))


def interleaved_axes(sections: Sequence[int]) -> tuple[int, ...]:
    """The number of the axis of each pair of components: the axes take turns, and axis 0 also gets the turns of an axis that has no pairs
    left (Bai et al. 2025). sections: number of pairs of each axis."""
    axes = len(sections)
    turns = (pair % axes for pair in range(sum(sections)))
    # An axis has one turn in `axes` pairs, so its last pair comes before number `sections[axis] * axes`.
    return tuple(axis if pair < sections[axis] * axes else 0 for pair, axis in enumerate(turns))


def rotary(theta: float = 10_000.0, axis_of_pair: Sequence[int] = ()) -> Callable[[Materials], Rope]:
    """Returns a function that builds rotary positions. theta: base of the frequencies. axis_of_pair: from `contiguous_axes` or
    `interleaved_axes`; empty: there is one axis."""
    return lambda materials: Rotary(materials, theta, axis_of_pair)


class Rotary:
    """Implements `Rope`. theta, axis_of_pair: see `rotary`. Raises ValueError if `axis_of_pair` does not have an entry for each pair of
    components of a head."""

    def __init__(self, materials: Materials, theta: float, axis_of_pair: Sequence[int]) -> None:
        config = self._config = materials.config
        self._half = config.head_size // 2
        if axis_of_pair and len(axis_of_pair) != self._half:
            raise ValueError(f"the sections of positions are {len(axis_of_pair)} pairs of components, and a head has {self._half}")
        self.axes = max(axis_of_pair, default=0) + 1
        table = rotary_table(config.context, config.head_size, theta, materials.dtype)
        self._cos, self._sin = (values.to(materials.device) for values in table)
        self._axis_of_component = torch.tensor([*axis_of_pair, *axis_of_pair], dtype=torch.int64, device=materials.device)
        self._components = torch.arange(config.head_size, device=materials.device)

    def __call__(self, positions: torch.Tensor) -> Turn:
        cos, sin = self._factors(positions)

        def turn(heads: torch.Tensor) -> None:
            rolled = heads.roll(self._half, -1)
            heads.mul_(cos).addcmul_(rolled, sin)

        return turn

    def _factors(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(cosines, sines): the factors of the heads, and of the heads rolled by half a head; [rows, query_heads + 2 * kv_heads, head_size]
        each. Queries are also scaled; values get 1 and 0."""
        heads, kv_heads, scale = self._config.query_heads, self._config.kv_heads, self._config.head_size**-0.5
        cos, sin = (self._by_axis(table[positions[: self.axes]]) for table in (self._cos, self._sin))
        cosines = (cos.mul(scale).expand(-1, heads, -1), cos.expand(-1, kv_heads, -1), torch.ones_like(cos).expand(-1, kv_heads, -1))
        sines = (sin.mul(scale).expand(-1, heads, -1), sin.expand(-1, kv_heads, -1), torch.zeros_like(sin).expand(-1, kv_heads, -1))
        return torch.cat(cosines, 1), torch.cat(sines, 1)

    def _by_axis(self, values: torch.Tensor) -> torch.Tensor:
        """For each component the value of its own axis. values: [axes, rows, 1, head_size]. Returns [rows, 1, head_size]."""
        if values.shape[0] == 1:
            return values[0]
        # The two index tensors select [head_size, rows].
        return values[self._axis_of_component, :, 0, self._components].t()[:, None]


def rotary_table(positions: int, head_size: int, theta: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the rotary angles, both [positions, 1, head_size].

    Component i of the first half turns with component i of the second. The sines of the first half are negative, so that
    `x * cos + roll(x, half) * sin` is Transformers' `x * cos + rotate_half(x) * sin`. Angles are computed in float32 as there."""
    frequencies = 1.0 / (theta ** (torch.arange(0, head_size, 2, dtype=torch.float32) / head_size))
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).to(dtype)[:, None], torch.cat((-sin, sin), -1).to(dtype)[:, None]


FeedForward = Callable[[StepRows, torch.Tensor], torch.Tensor]
"""Maps [rows, hidden_size] to the same shape. The result of a row does not depend on the others."""

Activation = Callable[[torch.Tensor], torch.Tensor]
"""A function that is applied to each number by itself."""

_COLUMNS = 32
"""An activation gets a multiple of this many columns. A processor computes exponentials of 16 numbers at a time, and the remainder at the
end of all rows in another way, with other bits. A multiple of 32 leaves no remainder."""

_SERIAL = (1 << 15) - 1
"""PyTorch leaves up to this many numbers to one thread. More numbers are divided among its threads, even in the middle of a row, and then
each thread has a remainder."""


def by_rows(activation: Activation, x: torch.Tensor) -> torch.Tensor:
    """Apply an activation to any number of rows, so that the bits of a row do not depend on that number. x: [rows, columns]."""
    max_rows = max(_SERIAL // x.shape[1], 1)
    if len(x) <= max_rows or not x.is_cpu or torch.get_num_threads() == 1:
        return activation(x)
    return torch.cat([activation(part) for part in torch.split(x, max_rows)])


def swiglu(materials: Materials, layer: int) -> FeedForward:
    """Build the gated feed-forward (Shazeer 2020) of a layer, from this rank's columns; its result is the sum of all ranks."""
    product, group = gated_product(materials, f"layers.{layer}.mlp", materials.config.ffn_size), materials.group
    return lambda rows, x: group.all_reduce(product(x))


@dataclass(frozen=True, slots=True)
class GatedProduct:
    """Computes down(silu(gate(x)) * up(x)). gate_up: one product that gives gate and up next to each other. x: [rows, hidden_size]; the
    result too."""

    gate_up: Linear
    down: Linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(apply_gate(self.gate_up(x)))


def apply_gate(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, [rows, columns]. gate_up: [rows, 2 * columns], gate and up side by side. A row of the gate is activated by itself,
    because silu over a part of a wider tensor may round differently."""
    gate, up = gate_up.chunk(2, -1)
    return by_rows(functional.silu, gate) * up


def gated_product(materials: Materials, prefix: str, size: int) -> GatedProduct:
    """Build this rank's part of a gated product. prefix: beginning of the names of its three weights. size: columns of this rank."""
    hidden = materials.config.hidden_size
    gate_up = materials.fuse(prefix, {"gate_proj": size, "up_proj": size}, hidden)
    return GatedProduct(gate_up, materials.fuse(prefix, {"down_proj": hidden}, size))


def activated_product(
    materials: Materials, prefix: str, names: tuple[str, str], widths: tuple[int, int, int], activation: Activation
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Build this rank's part of second(activation(first(x))). prefix, names: the weights are prefix.name.weight. widths: of the input,
    between the products, and of the output. activation: maps 0 to 0, because the columns between are padded with zeros."""
    (first_name, second_name), (before, between, width_out) = names, widths
    padding = -between % _COLUMNS  # up to the next multiple
    bias = materials.fused_bias(prefix, {first_name: between})
    first = materials.linear(
        functional.pad(materials.need(f"{prefix}.{first_name}.weight", (between, before)), (0, 0, 0, padding)),
        None if bias is None else functional.pad(bias, (0, padding)),
    )
    second = materials.linear(
        functional.pad(materials.need(f"{prefix}.{second_name}.weight", (width_out, between)), (0, padding)),
        materials.fused_bias(prefix, {second_name: width_out}),
    )
    return lambda x: second(by_rows(activation, first(x)))


_GATES = 32
"""Number of equal columns in which the shared expert's gate is computed; `_COLUMNS` says why."""


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """Sizes of a feed-forward of experts. experts: number of experts. size: columns of an expert. normalized: whether the weights of the
    chosen experts add up to 1. shared: columns, in all ranks together, of an expert that every row goes through, weighed by a gate of its
    own; 0: there is none."""

    experts: int
    experts_per_row: int
    size: int
    normalized: bool
    shared: int = 0

    @property
    def divided_sizes(self) -> dict[str, int]:
        """The sizes that the number of ranks must divide, by their names for an error: see `config_of_part`. The number of experts is not
        among them, because one rank may have one expert more than another."""
        return {"columns of the shared expert": self.shared} if self.shared else {}

    def of_rank(self, group: Group) -> range:
        """Numbers of the experts that a rank has: every `group.size`-th expert, beginning with number `group.rank`."""
        return range(group.rank, self.experts, group.size)


def experts(sizes: ExpertSizes) -> Callable[[Materials, int], FeedForward]:
    """A function that builds a layer's experts on this rank: some of the experts, some columns of the shared expert, and the whole
    router."""
    if not 0 < sizes.experts_per_row <= sizes.experts:
        raise ValueError(f"a row cannot be given to {sizes.experts_per_row} of {sizes.experts} experts")
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
        weights, numbers: weights and numbers of each row's experts, [n, experts_per_row]."""
        numbers, order = numbers.sort(-1)
        places, counts = together(self._number[numbers], len(self._experts))
        in_use = [(expert, count) for expert, count in zip(self._experts, counts, strict=True) if count]
        if not in_use:
            return torch.zeros_like(x)
        count, sizes = sum(counts), [count for _, count in in_use]
        # The place after all others is for the experts of other ranks: its row is not computed, and its result is zeros.
        gathered = x.new_zeros(count + 1, x.shape[1])
        # Each row is copied once for each of its experts.
        gathered.index_copy_(0, places.flatten(), x.repeat_interleave(numbers.shape[1], 0))
        parts = torch.split(gathered[:count], sizes)
        between = apply_gate(torch.cat([expert.gate_up(part) for (expert, _), part in zip(in_use, parts, strict=True)]))
        results = [expert.down(part) for (expert, _), part in zip(in_use, torch.split(between, sizes), strict=True)]
        weighed = torch.cat([*results, x.new_zeros(1, x.shape[1])])[places] * weights.gather(1, order)[:, :, None]
        # In order: a sum of the library may add in another order if there are more rows.
        return reduce(torch.add, weighed.unbind(1))

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights and the numbers of the experts that each row chooses, [rows, experts_per_row] each."""
        weights, numbers = functional.softmax(self._router(x), -1, dtype=torch.float32).topk(self._sizes.experts_per_row, -1)
        if self._sizes.normalized:
            # In order: a sum of the library may add in another order if there are more rows.
            weights = weights / reduce(torch.add, weights.unbind(-1))[:, None]
        return weights.to(x.dtype), numbers


def together(numbers: torch.Tensor, experts: int) -> tuple[torch.Tensor, list[int]]:
    """Find places that put the rows of each expert next to each other. numbers: the experts of each row, int64 [rows, experts_per_row];
    below `experts`, or equal to it for an expert of another rank. Returns a place for each entry of `numbers`, in the same shape, and for
    each expert its number of places, which includes padding to the fewest rows of a product. All rows of other ranks' experts share one
    place after all others."""
    flat = numbers.flatten()
    counts = flat.bincount(minlength=experts + 1).tolist()[:experts]
    padded_counts = [pad_rows(count) if count else 0 for count in counts]
    # The n-th row in the order of experts goes to place n plus the padding of all experts before its own.
    padding_before = torch.tensor([0, *accumulate(map(sub, padded_counts, counts))], device=numbers.device)
    order = flat.argsort(stable=True)
    places = torch.empty_like(flat)
    places[order] = torch.arange(len(flat), device=numbers.device) + padding_before[flat[order]]
    return places.clamp_(max=sum(padded_counts)).view_as(numbers), padded_counts
