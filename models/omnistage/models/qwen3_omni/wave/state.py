"""The state that the frames of a speech leave to later frames. It has the same size however many frames came before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class WaveState:
    """The state before a frame. place: number of this frame in its speech. seen: how many keys, counted from the last, belong to frames;
    the other keys are zeros. keys: keys and values of the last frames, [layers, 2, kv_heads, window - 1, head_size]. inputs: the last
    inputs of each convolution, in the order in which the net runs them, [channels, count] each; zeros before the first frame, as in
    Transformers.

    A step makes a new state and changes no old state, so a step that fails loses nothing."""

    place: int
    seen: int
    keys: torch.Tensor
    inputs: tuple[torch.Tensor, ...]

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.keys, *self.inputs))


class ConvolutionInputs:
    """The past inputs of the convolutions of one step, which the convolutions use in order: each puts its past inputs before its new
    inputs."""

    def __init__(self, states: Sequence[WaveState]) -> None:
        self._before = iter([torch.stack(each) for each in zip(*(state.inputs for state in states), strict=True)])
        self._left: list[torch.Tensor] = []

    def joined(self, x: torch.Tensor, keep: int) -> torch.Tensor:
        """The past inputs of the next convolution, followed by its new inputs. x: the new inputs, [speeches, channels, count]. keep: number
        of the last inputs that the next step needs."""
        inputs = torch.cat((next(self._before), x), 2)
        self._left.append(inputs[..., inputs.shape[2] - keep :])
        return inputs

    def left(self, speech: int) -> Iterable[torch.Tensor]:
        """The inputs that one speech leaves to the next step, by convolution. They are copies, because a view would keep the inputs of all
        speeches."""
        return (inputs[speech].clone() for inputs in self._left)
