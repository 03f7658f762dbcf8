"""Jobs that take steps together on threads which nobody can stop: a step has all of its jobs until it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Stepping(Generic[T]):
    """Who is in a step just now. Used from one event loop at a time."""

    def __init__(self) -> None:
        self._jobs = set[T]()
        self._ended = asyncio.Event()

    def __contains__(self, job: T) -> bool:
        return job in self._jobs

    def begin(self, jobs: Sequence[T]) -> None:
        """They are in one step from now on. Nobody is in two."""
        self._jobs.update(jobs)

    def end(self, jobs: Sequence[T]) -> None:
        self._jobs.difference_update(jobs)
        self._ended.set()
        self._ended = asyncio.Event()

    async def left(self, job: T) -> None:
        """Return when no step has it in it, whatever is cancelled meanwhile: what it works on would be freed under the thread."""
        cancelled: asyncio.CancelledError | None = None
        while job in self._jobs:
            try:
                await self._ended.wait()
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled


async def step_all(jobs: Sequence[T], step: Callable[[Sequence[T]], Awaitable[None]], fail: Callable[[T, Exception], None]) -> None:
    """A step of all of them at once; where it fails, of each alone: one of them is the cause. fail: told of each that fails alone. step: it
    may pass over those that have ended meanwhile; where it raises it has changed none."""
    try:
        await step(jobs)
    except Exception as error:
        if len(jobs) == 1:
            fail(jobs[0], error)
            return
    else:
        return
    for job in jobs:
        await step_all([job], step, fail)
