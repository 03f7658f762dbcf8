"""Ctrl-C during a benchmark: the first one ends the measuring, and the results so far are printed; the second one ends the command."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any

from omnistage.cli import interrupt


class Stop:
    """Handles signals as soon as it is made; make it in the task that measures. number: of the last signal; 0: none has come."""

    def __init__(self) -> None:
        self.number = 0
        self._task = asyncio.current_task()
        self._measuring: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        for number in interrupt.heeded_signals():
            loop.add_signal_handler(number, self._signalled, number)

    @property
    def came(self) -> bool:
        return self.number != 0

    async def unless_stopped(self, measuring: Coroutine[Any, Any, None]) -> None:
        """Await `measuring` to its end, or until the first signal, which ends it without an error. A second signal, and any signal that
        comes while this does not run, cancels the task in which this object was made."""
        self._measuring = asyncio.create_task(measuring)
        try:
            await self._measuring
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self.came or (task is not None and task.cancelling()):
                raise
        finally:
            self._measuring.cancel()
            self._measuring = None

    def _signalled(self, number: signal.Signals) -> None:
        is_first, self.number = not self.came, number
        if is_first and self._measuring is not None:
            self._measuring.cancel()
        elif self._task is not None:
            self._task.cancel()
