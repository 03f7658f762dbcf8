"""The engine's view of a constraint on the text of an answer: it says, token by token, which may come next."""

from __future__ import annotations

from typing import Protocol

import torch


class Walk(Protocol):
    """One answer's way through its constraint, token by token. One thread at a time uses it."""

    @property
    def complete(self) -> bool:
        """Whether the answer is known to be complete, so that only an end may follow. This costs nothing."""

    @property
    def must_end(self) -> bool:
        """Whether only an end may come next. It may take a call of `allowed` to know this."""

    def allowed(self) -> torch.Tensor:
        """The tokens that may come next, with the end tokens if the answer may end: int32 [ceil(vocabulary / 32)] on the CPU, one bit for
        each token, the lowest bit first. If no bit is set, the answer cannot go on. Neither the caller nor this object changes it later."""

    def note(self, token_id: int) -> None:
        """Go on by one token of the answer, which is no end token."""


class Constraint(Protocol):
    """The constraint of one request's text."""

    @property
    def vocabulary(self) -> int:
        """Number of its tokens, which is the size of the decoder's vocabulary."""

    def begin(self) -> Walk:
        """A new walk, which begins after the history of the request."""
