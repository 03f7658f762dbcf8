"""What a thread that computes is doing, written down for whoever watches it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

STEP_LIMIT_S = 60.0
"""What a step may take, waiting for a CPU left out, if a family states nothing else: many times the longest one on a slow CPU."""


class Activity:
    """One thread that computes: whether it has work, and how many steps it has done.

    name: for the log. step_limit_s: a step that takes longer hangs, the time in which the thread waits for a CPU left out.
    helped: other threads, of torch's pool, may compute what it waits for. processes: so may threads of these, by their ids.
    `begin` and `rest` are called under the lock that guards the thread's queue; reading needs none.
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
        """Called once by the thread itself."""
        self.thread_id = threading.get_native_id()

    def begin(self) -> None:
        """There is work."""
        if not self.busy:
            self.busy = True
            if self._tell is not None:
                self._tell()

    def step(self) -> None:
        """A step was done."""
        self.steps += 1

    def rest(self) -> None:
        """There is no work."""
        self.busy = False
