"""Unfinished drawings as states that the caller keeps, so that a replica which takes over goes on at a step and not at the first one.

States are the bits of float32 values, as codes, because callers keep codes. A picture gets a few states, and only as many as fit into
the message that opens the next session. The state of a picture holds its latents, the tensors that its sampler remembers, filled up to the
largest number that it ever remembers, and the state of its noise.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from omnistage.models.diffusers.plan import DrawingPlan
from omnistage.models.diffusers.sampler import NOISE_BYTES, Memory, SamplerState
from omnistage.models.interface import BadRequest

CHECKPOINT = "checkpoint"
MOST = 3
"""How many states of one picture are kept, at most."""
WORDS = 1 << 18
"""How many words all checkpoints of a session have together, at most; a word takes up to five bytes of a message."""
NOISE_WORDS = NOISE_BYTES // 4


class StateLayout:
    """The form in which the states of the pictures of a plan are written, as words of 32 bits. values: number of values in the latents of
    one picture. width: words of a row; rows: number of rows of the states of all pictures after one step. memory: of the scheduler."""

    def __init__(self, plan: DrawingPlan, values: int, width: int, memory: Memory) -> None:
        self.width, self._values, self._memory, self._pictures = width, values, memory, plan.results
        self._noise = NOISE_WORDS if memory.draws else 0
        words = values * (1 + memory.tensors) + self._noise
        self.rows = -(-words // width) * plan.results
        count = 0 if plan.step_cache else min(MOST, WORDS // (self.rows * width), plan.steps - 1)
        self.steps = tuple(-(-plan.steps * number // (count + 1)) for number in range(1, count + 1))
        """The steps after which states are kept, evenly spread. With a step cache, whose memory is not kept, there are none."""

    def check(self, history: NDArray[np.uint32]) -> None:
        """Raises BadRequest for a history that this plan cannot have made."""
        max_rows = self.rows * len(self.steps)
        if history.ndim != 2 or history.shape[1] != self.width or len(history) > max_rows:
            raise BadRequest("resume.history", f"port {CHECKPOINT!r} has at most {max_rows} rows of {self.width} for this request")
        words = np.ascontiguousarray(history).reshape(-1)
        places = np.arange(len(words)) % (self.rows // self._pictures * self.width)
        if not np.isfinite(words[places < self._values * (1 + self._memory.tensors)].view(np.float32)).all():
            raise BadRequest("resume.history", f"port {CHECKPOINT!r} has values that are no numbers")
        if self._noise:
            for words in self._by_picture(history[: len(history) // self.rows * self.rows]):
                try:
                    torch.Generator("cpu").set_state(self._noise_of(words))
                except RuntimeError as error:
                    raise BadRequest("resume.history", f"port {CHECKPOINT!r} has noise that no generator draws: {error}") from None

    def written(self, states: Sequence[SamplerState]) -> NDArray[np.uint32]:
        """The states after one step, one for each picture that is drawn, as rows: [rows, width]."""
        words = np.zeros((self._pictures, self.rows // self._pictures * self.width), np.uint32)
        for row, state in zip(words[-len(states) :], states, strict=True):
            values = torch.cat([each.float().flatten() for each in (state.latents, *state.history)]).cpu().numpy().view(np.uint32)
            row[: len(values)] = values
            if state.noise is not None:
                row[-self._noise :] = state.noise.numpy().view(np.uint32)
        return words.reshape(-1, self.width)

    def read(self, history: NDArray[np.uint32], latents: Tensor) -> list[SamplerState]:
        """The last states in the history, one for each picture; empty if no step is whole. latents: of the same shape and type."""
        if not (reached := len(history) // self.rows):
            return []
        step, last = self.steps[reached - 1], history[(reached - 1) * self.rows : reached * self.rows]
        return [self._state(step, words, latents) for words in self._by_picture(last)]

    def _by_picture(self, history: NDArray[np.uint32]) -> NDArray[np.uint32]:
        return history.reshape(-1, self.rows // self._pictures * self.width)

    def _state(self, step: int, words: NDArray[np.uint32], latents: Tensor) -> SamplerState:
        """The state of one picture, read from all of its words. step: number of steps that it has taken. latents: as in `read`."""
        count = 1 + self._memory.tensors
        values = torch.from_numpy(words[: count * self._values].copy().view(np.float32)).reshape(count, *latents.shape).to(latents.device)
        return SamplerState(step, values[0].to(latents), tuple(values[1:]), self._noise_of(words) if self._noise else None)

    def _noise_of(self, words: NDArray[np.uint32]) -> Tensor:
        return torch.from_numpy(words[-self._noise :].copy().view(np.uint8))
