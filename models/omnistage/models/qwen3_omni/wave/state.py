"""The state that the frames of a speech leave to later frames: all that the net knows of the past, however long the past is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class WaveState:
    """The state before a frame. place: place of this frame in its speech. seen: how many of the keys, the last ones, belong to frames.
    keys: keys and values of the last frames, [layers, 2, kv_heads, window - 1, head_size]. inputs: last inputs of each convolution, in the
    order in which the net comes to them, [channels, count] each; zeros are what Transformers has before the first one.

    A step changes no state, but makes another one: a step that fails has lost nothing."""

    place: int
    seen: int
    keys: torch.Tensor
    inputs: tuple[torch.Tensor, ...]

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.keys, *self.inputs))


class ConvolutionInputs:
    """Inputs of the convolutions of one step, in order: inputs that a convolution kept from the step before stand before its new ones."""

    def __init__(self, states: Sequence[WaveState]) -> None:
        self._before = iter([torch.stack(each) for each in zip(*(state.inputs for state in states), strict=True)])
        self._left: list[torch.Tensor] = []

    def joined(self, x: torch.Tensor, keep: int) -> torch.Tensor:
        """The old inputs with the new ones. x: [speeches, channels, count]. keep: how many inputs the next step needs."""
        joined = torch.cat((next(self._before), x), 2)
        self._left.append(joined[..., joined.shape[2] - keep :])
        return joined

    def left(self, speech: int) -> Iterable[torch.Tensor]:
        """The inputs that one of the speeches leaves to the next step. They are copies: a view would keep the inputs of all speeches of the
        step."""
        return (kept[speech].clone() for kept in self._left)
