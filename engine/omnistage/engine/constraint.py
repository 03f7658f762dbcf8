"""The engine's view of a constraint on the text of an answer, which says before each token which tokens are allowed."""

from __future__ import annotations

from typing import Protocol

import torch


class Walk(Protocol):
    """The state of a constraint within one answer: the tokens so far decide which may come next. One thread at a time uses it."""

    @property
    def complete(self) -> bool:
        """Whether it is known already that only an end may follow. False may also mean: not known yet. Reading it costs nothing."""

    @property
    def must_end(self) -> bool:
        """Whether only an end may come next. To find out, this may call `allowed`, which takes time."""

    def allowed(self) -> torch.Tensor:
        """The tokens that may come next, with the end tokens if the answer may end: int32 [ceil(vocabulary / 32)] on the CPU, one bit for
        each token, the lowest bit first. If no bit is set, the answer cannot go on. Neither the caller nor this object changes it later."""

    def note(self, token_id: int) -> None:
        """Add the next token of the answer, which is no end token."""


class Constraint(Protocol):
    """The constraint of one request's text."""

    @property
    def vocabulary(self) -> int:
        """Number of its tokens, which is the size of the decoder's vocabulary."""

    def begin(self) -> Walk:
        """A new walk for an answer, which begins after the request's history."""
