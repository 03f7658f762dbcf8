"""The engine's view of the other ranks of a decoder, which follow every step of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from omnistage.engine.plan import StepPlan


class Followers(Protocol):
    """The other ranks. Each rank has a cache like the engine's, for its own heads, and carries out orders one after the other. Each method
    raises RanksApart if a rank has ended. processes: ids of their processes."""

    @property
    def processes(self) -> Sequence[int]: ...

    def new_cache(self, pages: int, *, poison: bool = False) -> None:
        """Replace the cache on each rank by one of this many pages. poison: see KVCache."""

    def pages_changed(self, new: Sequence[int], freed: Sequence[int]) -> None:
        """See KVCache.follow."""

    def step(self, plan: StepPlan) -> AbstractContextManager[None]:
        """A context in which the other ranks compute the hidden rows of a step. The caller computes inside; an error there becomes
        RanksApart."""


class Nobody:
    """Implements `Followers` without any: one process has the whole decoder."""

    processes = ()

    def new_cache(self, pages: int, *, poison: bool = False) -> None: ...

    def pages_changed(self, new: Sequence[int], freed: Sequence[int]) -> None: ...

    def step(self, plan: StepPlan) -> AbstractContextManager[None]:
        return nullcontext()


NOBODY = Nobody()
