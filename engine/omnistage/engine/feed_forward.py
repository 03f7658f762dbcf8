"""The gated feed-forward of a layer (SwiGLU), and two products with an activation between them.

If each rank computes a part of the feed-forward, the parts are summed inside, so the caller gets the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as functional

from omnistage.engine.adapter import StepRows
from omnistage.engine.linear import Linear
from omnistage.engine.materials import Materials

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
    """silu(gate) * up. gate_up: [rows, 2 * columns], gate and up side by side, so each row of the gate is activated by itself."""
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
    missing = -between % _COLUMNS
    bias = materials.fused_bias(prefix, {first_name: between})
    first = materials.linear(
        functional.pad(materials.need(f"{prefix}.{first_name}.weight", (between, before)), (0, 0, 0, missing)),
        None if bias is None else functional.pad(bias, (0, missing)),
    )
    second = materials.linear(
        functional.pad(materials.need(f"{prefix}.{second_name}.weight", (width_out, between)), (0, missing)),
        materials.fused_bias(prefix, {second_name: width_out}),
    )
    return lambda x: second(by_rows(activation, first(x)))
