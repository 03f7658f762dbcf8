"""The other ranks of a decoder, which follow every step of the engine, as the engine sees them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from omnistage.engine.plan import StepPlan


class Followers(Protocol):
    """Each follower has a cache like the engine's, for its own heads, and carries out orders one after the other. Each method raises
    RanksApart if a follower has ended. processes: ids of their processes."""

    @property
    def processes(self) -> Sequence[int]: ...

    def new_cache(self, pages: int, *, poison: bool = False) -> None:
        """Replace the cache of each follower by one of this many pages; see KVCache."""

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
