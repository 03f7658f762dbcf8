"""What the frames of a speech leave to those behind them: all that the net knows of the past, however long that is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class State:
    """place: of the next frame in its speech. seen: how many of the keys are of frames; those before them are nothing. keys: of the last
    frames, and their values, [layers, 2, kv_heads, window - 1, head_size]. inputs: the last ones of each convolution, in the order in
    which the net comes to them, [channels, count] each; zeros are what Transformers has before the first one.

    A step changes no state, it makes another one: a step that fails has lost nothing."""

    place: int
    seen: int
    keys: torch.Tensor
    inputs: tuple[torch.Tensor, ...]

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.keys, *self.inputs))


class Inputs:
    """Inputs of the convolutions of one step, in their order: what each saw last time goes before what it sees now."""

    def __init__(self, states: Sequence[State]) -> None:
        self._before = iter([torch.stack(each) for each in zip(*(state.inputs for state in states), strict=True)])
        self._left: list[torch.Tensor] = []

    def joined(self, x: torch.Tensor, keep: int) -> torch.Tensor:
        """x: [speeches, channels, count]. keep: how many inputs the next step needs."""
        joined = torch.cat((next(self._before), x), 2)
        self._left.append(joined[..., joined.shape[2] - keep :])
        return joined

    def left(self, speech: int) -> Iterable[torch.Tensor]:
        """To the next step, by one of the speeches. Copies: each would keep what all speeches of the step have alive."""
        return (kept[speech].clone() for kept in self._left)
