"""Cancelled tasks, limits of time, and errors that keep nothing of a request.

An error refers to the frames in which it was raised, a task to its error, and a frame to its tasks. These references can form a cycle,
which would keep the media of a request in memory until the collector runs.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from types import TracebackType
from typing import Any

from omnistage.wire.errors import StageError

LOOKS = 8
"""How many times `within` checks, before its limit, whether this process was held up."""


class within:
    """`async with within(seconds, late)`: raises the error that `late` returns if the block takes longer. The error refers to no task,
    unlike the error of `asyncio.timeout`, so a task may end with it.

    The limit is for waiting for a peer. So time in which this process was stopped, or its loop held up, does not count, because this
    process would not have heard a peer that answered in time. counts_all: count that time too, for an agreed moment such as a deadline.
    """

    def __init__(self, seconds: float, make_error: Callable[[], StageError], *, counts_all: bool = False) -> None:
        self._limit: asyncio.Timeout | None = asyncio.timeout(seconds)
        self._late = make_error
        self._wait_s = math.inf if counts_all else max(seconds, 0.0) / LOOKS
        self._next_look: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        assert self._limit is not None
        await self._limit.__aenter__()
        self._plan_look()

    def _plan_look(self) -> None:
        if math.isfinite(self._wait_s):
            self._next_look = asyncio.get_running_loop().call_later(self._wait_s, self._look)

    def _look(self) -> None:
        """Extend the limit by the seconds that this look comes too late. A loop that was held up past this look and the end of the limit
        runs this look first, because it was due first."""
        if self._limit is None or self._next_look is None or (ends := self._limit.when()) is None or self._limit.expired():
            return
        late_s = asyncio.get_running_loop().time() - self._next_look.when()
        self._limit.reschedule(ends + max(late_s, 0.0))
        self._plan_look()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        limit, self._limit = self._limit, None
        assert limit is not None
        if self._next_look is not None:
            self._next_look.cancel()
        try:
            await limit.__aexit__(kind, error, trace)
            return
        except TimeoutError:
            pass
        finally:
            del limit, error, trace
        raise self._late() from None


def look_at_error(task: asyncio.Task[Any]) -> None:
    """Retrieve the error of a task that has ended, because asyncio logs an error that nobody retrieves. The error itself does not
    matter."""
    if not task.cancelled():
        task.exception()


def let_go(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel tasks whose results nobody needs any more; their errors are ignored."""
    for task in tasks:
        if task is not None:
            task.cancel()
            task.add_done_callback(look_at_error)


async def cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait for their end. Their errors were handled already or do not matter any more."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        look_at_error(task)


def forget_traceback(error: BaseException) -> None:
    """Remove the frames from an error that ends a call, and from its chain of contexts."""
    cause: BaseException | None = error
    while cause is not None:
        cause.__traceback__ = None
        cause = cause.__context__
