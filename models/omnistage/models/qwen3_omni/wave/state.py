"""The state that the frames of a speech leave to later frames: all that the net knows of the past, of one size for any past."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class WaveState:
    """The state before a frame. place: number of this frame in its speech. seen: how many of the keys, counted from the end, belong to
    frames. keys: keys and values of the last frames, [layers, 2, kv_heads, window - 1, head_size]. inputs: the last inputs of each
    convolution, in the order in which the net runs them, [channels, count] each; zeros before the first frame, as in Transformers.

    A step changes no state but makes a new one, so a step that fails loses nothing."""

    place: int
    seen: int
    keys: torch.Tensor
    inputs: tuple[torch.Tensor, ...]

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.keys, *self.inputs))


class ConvolutionInputs:
    """The past inputs of the convolutions of one step, taken in order: each convolution puts the ones that it kept before its new ones."""

    def __init__(self, states: Sequence[WaveState]) -> None:
        self._before = iter([torch.stack(each) for each in zip(*(state.inputs for state in states), strict=True)])
        self._left: list[torch.Tensor] = []

    def joined(self, x: torch.Tensor, keep: int) -> torch.Tensor:
        """The past inputs of the next convolution, followed by its new ones. x: the new ones, [speeches, channels, count]. keep: how many
        inputs the next step needs."""
        joined = torch.cat((next(self._before), x), 2)
        self._left.append(joined[..., joined.shape[2] - keep :])
        return joined

    def left(self, speech: int) -> Iterable[torch.Tensor]:
        """The inputs that one speech leaves to the next step, by convolution: copies, because a view would keep those of all speeches."""
        return (kept[speech].clone() for kept in self._left)
