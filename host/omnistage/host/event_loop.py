"""The event loop of a process as a thread that a watchdog can watch: the loop counts as busy while it owes an answer.

If the loop of a stage is blocked, other processes notice its silence and use another replica. The process must end too, because no other
router acts for this one, and a replica is started anew only after it has ended.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType

PERIOD_S = 2.0
"""Seconds between two questions, and between two checks for an answer, because an answer in time wakes no thread."""

PATIENCE_S = 2.0
"""Time to answer a question. Only a loop that takes longer is watched more closely, so a loop that answers costs two wake-ups in a
period."""

STEP_LIMIT_S = 60.0
"""Seconds that one callback may compute, beyond PATIENCE_S."""


class EventLoop:
    """The running event loop as a Watched thread, for a Watchdog; a context manager. Another thread asks the loop for an answer once in
    PERIOD_S.

    answers: number of all answers so far. steps: number of late answers. busy: the loop owes an answer that is late now."""

    name = "event loop"
    step_limit_s = STEP_LIMIT_S
    helped = False
    processes: Sequence[int] = ()

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tell: Callable[[], None] = lambda: None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._ask_for_ever, name="omnistage-loop-watch", daemon=True)
        self.thread_id: int | None = threading.get_native_id()
        self.answers = 0
        self.steps = 0
        self.busy = False

    def on_busy(self, tell: Callable[[], None]) -> None:
        """Call `tell`, which must not wait, when an answer is late."""
        self._tell = tell

    def __enter__(self) -> EventLoop:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._stopped.set()

    def _ask_for_ever(self) -> None:
        """Ask the loop for a sign once in PERIOD_S, and wait for each answer."""
        while not self._stopped.is_set():
            answered = threading.Event()
            asked_s = time.monotonic()
            try:
                self._loop.call_soon_threadsafe(answered.set)
            except RuntimeError:  # The loop was closed meanwhile.
                return
            while not self._stopped.wait(PERIOD_S) and not answered.is_set():
                if time.monotonic() >= asked_s + PATIENCE_S:
                    self._wait(answered)
            self.answers += 1

    def _wait(self, answered: threading.Event) -> None:
        """Wait for an answer that is late, which wakes this thread as soon as it comes. Meanwhile the loop counts as busy."""
        self.busy = True
        self._tell()
        while not (answered.wait(PERIOD_S) or self._stopped.is_set()):
            pass
        self.steps += 1
        self.busy = False
