"""The other ranks of a decoder, which follow every step of the engine, as the engine sees them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from omnistage.engine.plan import StepPlan


class Followers(Protocol):
    """Each has a cache like that of the engine, for its heads, and follows orders in their sequence. Everything raises RanksApart if one of
    them has ended. processes: their ids."""

    @property
    def processes(self) -> Sequence[int]: ...

    def new_cache(self, pages: int, *, poison: bool = False) -> None:
        """Have a cache of this many pages, and no other one; see KVCache."""

    def pages_changed(self, taken: Sequence[int], freed: Sequence[int]) -> None:
        """See KVCache.follow."""

    def step(self, plan: StepPlan) -> AbstractContextManager[None]:
        """Compute the hidden rows of a step while the caller does so inside the block: an error there becomes RanksApart."""


class Nobody:
    """Implements `Followers` for a decoder that one process has whole."""

    processes = ()

    def new_cache(self, pages: int, *, poison: bool = False) -> None: ...

    def pages_changed(self, taken: Sequence[int], freed: Sequence[int]) -> None: ...

    def step(self, plan: StepPlan) -> AbstractContextManager[None]:
        return nullcontext()


NOBODY = Nobody()
