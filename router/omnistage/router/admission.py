"""A house with so many places: who finds it full is told at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from omnistage.link.errors import StageError

RETRY_DELAY_S = 1.0


class Admission:
    """Counts the answers that run."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.running = 0

    def drain(self) -> None:
        self._draining = True

    @contextmanager
    def place(self) -> Iterator[None]:
        """Hold a place. Raises OVERLOADED with a delay, or DRAINING; never waits."""
        if self._draining:
            raise StageError("DRAINING", "this router is shutting down; ask another", retry_delay_s=RETRY_DELAY_S)
        if self.running >= self._limit:
            raise StageError("OVERLOADED", f"all {self._limit} places are taken; try again", retry_delay_s=RETRY_DELAY_S)
        self.running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.running -= 1
            if not self.running:
                self._idle.set()

    async def idle(self) -> None:
        """Return when no answer runs."""
        await self._idle.wait()
