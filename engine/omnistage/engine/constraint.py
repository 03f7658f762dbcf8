"""Constraint on the text of an answer, as the engine sees it: which tokens may come next, step by step."""

from __future__ import annotations

from typing import Protocol

import torch


class Walk(Protocol):
    """The position of one answer in its constraint. One thread at a time uses it."""

    @property
    def complete(self) -> bool:
        """Whether the answer is known to be complete: only an end may follow. This costs nothing."""

    @property
    def must_end(self) -> bool:
        """Whether only an end may come next. This may become known only when `allowed` is asked."""

    def allowed(self) -> torch.Tensor:
        """The tokens that may come next, including an end if the answer may end: int32 [ceil(vocabulary / 32)] on the CPU, a bit for each
        token, the lowest first. Without any bit the answer cannot go on. Neither the caller nor this object changes it later."""

    def note(self, token_id: int) -> None:
        """Take the next token of the answer, which is no end."""


class Constraint(Protocol):
    """A constraint of one request."""

    @property
    def vocabulary(self) -> int:
        """Number of tokens that it knows: the size of the decoder's vocabulary."""

    def begin(self) -> Walk:
        """A walk that stands after the history of the request."""
