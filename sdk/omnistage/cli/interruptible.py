"""Runs work on an event loop. Ctrl-C, a hangup or SIGTERM cancels it, once, and only until it is complete."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from omnistage.cli import interrupt


class Interrupted(Exception):
    """The work was interrupted before it was complete, and has cleaned up. number: of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by signal {number}")
        self.number = number


class Interruptible:
    """One piece of work. It calls `complete` when it has its result; from then on an interrupt does not lose the result."""

    def __init__(self) -> None:
        self._number = 0  # of the signal that interrupted; 0: none
        self._is_complete = False

    def run(self, work: Callable[[Interruptible], Awaitable[None]]) -> None:
        """Run `work(self)` to its end on an event loop of its own. Raises Interrupted, and whatever the work raises."""
        try:
            asyncio.run(self._run(work))
        except asyncio.CancelledError:
            if not self._number:
                raise
            raise Interrupted(self._number) from None

    def complete(self) -> None:
        """Ignore interrupts from here on, while the result is written and printed."""
        self._is_complete = True
        interrupt.ignore()

    async def unless_interrupted(self, rest: Coroutine[Any, Any, None]) -> None:
        """Run a part, such as playing the sound, that an interrupt may end although the work is complete. Raises Interrupted."""
        task = asyncio.create_task(rest)
        loop = asyncio.get_running_loop()

        def interrupted(number: int) -> None:
            self._number = number
            loop.call_soon_threadsafe(task.cancel)

        interrupt.call_once(interrupted)
        try:
            await task
        except asyncio.CancelledError:
            if not self._number:
                raise
            raise Interrupted(self._number) from None
        finally:
            task.cancel()
            interrupt.ignore()

    async def _run(self, work: Callable[[Interruptible], Awaitable[None]]) -> None:
        """Run the work, and cancel it at the first interrupt."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        if task is None:
            raise RuntimeError("work runs as a task")

        def cancel() -> None:
            # The work may have become complete between the signal and this call.
            if not self._is_complete:
                task.cancel()

        def interrupted(number: int) -> None:
            self._number = number
            loop.call_soon_threadsafe(cancel)

        interrupt.call_once(interrupted)
        await work(self)
