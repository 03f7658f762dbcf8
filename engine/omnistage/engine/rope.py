"""Applies the positions of rows to their queries and keys: rotary positions (Su et al. 2021) on one axis or several.

A rope is called once in each step, with the positions of the step's rows. It returns a function that turns the heads of each layer in
place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from omnistage.engine.materials import Materials

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
        return values[self._axis_of_component, :, 0, self._components].t()[:, None]


def rotary_table(positions: int, head_size: int, theta: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the rotary angles, both [positions, 1, head_size].

    Component i of the first half turns with component i of the second. The sines of the first half are negative, so that
    `x * cos + roll(x, half) * sin` is Transformers' `x * cos + rotate_half(x) * sin`. Angles are computed in float32 as there."""
    frequencies = 1.0 / (theta ** (torch.arange(0, head_size, 2, dtype=torch.float32) / head_size))
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).to(dtype)[:, None], torch.cat((-sin, sin), -1).to(dtype)[:, None]
