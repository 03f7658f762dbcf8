"""What the text of an answer is kept to, as the engine sees it: which tokens may come next, place after place."""

from __future__ import annotations

from typing import Protocol

import torch


class Walk(Protocol):
    """How far one answer is in its constraint. Used by one thread at a time."""

    @property
    def complete(self) -> bool:
        """Known to be whole: nothing may follow but an end. Costs nothing."""

    @property
    def must_end(self) -> bool:
        """Only an end may come next. True also where that was not known before `allowed` was asked."""

    def allowed(self) -> torch.Tensor:
        """The tokens that may come next, an end among them where the answer may end: int32 [ceil(vocabulary / 32)] on the CPU, a bit for
        each token, the lowest first. No bit at all: nothing leads on. Not to be changed, and not changed later."""

    def note(self, token_id: int) -> None:
        """The next token of the answer, no end."""


class Constraint(Protocol):
    """A constraint of one request."""

    @property
    def vocabulary(self) -> int:
        """Tokens that it knows: those of the decoder."""

    def begin(self) -> Walk:
        """A walk that stands after the history of the request."""
