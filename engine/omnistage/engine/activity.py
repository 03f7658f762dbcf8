"""The present work of a computing thread, written down for the watchdog."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

STEP_LIMIT_S = 60.0
"""Longest step, without waits for a CPU, if a family states nothing else: many times the longest step on a slow CPU."""


class Activity:
    """One thread that computes: whether it has work, and how many steps it has done.

    name: for the log. step_limit_s: a longer step counts as hanging; time in which the thread waits for a CPU does not count. helped: the
    thread may sleep while other threads, such as torch's pool, compute for it. processes: ids of processes whose threads may compute for it
    too. `begin` and `rest` are called under the lock that guards the thread's queue; reading needs no lock.
    """

    helped = True

    def __init__(self, name: str, step_limit_s: float = STEP_LIMIT_S, processes: Sequence[int] = ()) -> None:
        self.name = name
        self.processes = processes
        self.step_limit_s = step_limit_s
        self.thread_id: int | None = None
        self.steps = 0
        self.busy = False
        self._tell: Callable[[], None] | None = None

    def on_busy(self, tell: Callable[[], None]) -> None:
        """Call `tell`, which must not wait, whenever work comes to the resting thread."""
        self._tell = tell

    def enter(self) -> None:
        """The thread itself calls this once."""
        self.thread_id = threading.get_native_id()

    def begin(self) -> None:
        """Note that there is work."""
        if not self.busy:
            self.busy = True
            if self._tell is not None:
                self._tell()

    def step(self) -> None:
        """Note that a step was done."""
        self.steps += 1

    def rest(self) -> None:
        """Note that there is no work."""
        self.busy = False
