"""Finds a computing thread that hangs: it has work, and does nothing.

A thread hangs when it has work and, within one step, neither used a CPU nor waited for one for STILL_S, or when one step took more of its
own time than its family says. A busy machine makes nobody hang: a look that came late itself is not counted, because then this process was
held up as a whole (by a full machine, SIGSTOP, or a call that keeps Python's lock). Neither is a look in which any other thread of the
process is runnable: the kernel does not tell one that waits for a CPU from one that has it, so a busy event loop delays the verdict. While
no thread has work, this one sleeps.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

PERIOD_S = 0.25
LATE_S = 0.1
"""A look that comes later than this after its time is not judged."""
STILL_S = 1.5

_TASKS = Path("/proc/self/task")
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Watched(Protocol):
    """A thread that computes. thread_id: the kernel's number of it, None until it runs. steps: how many it has done. busy: it has work.
    step_limit_s: most seconds of a step, time in which it waits for a CPU left out."""

    @property
    def name(self) -> str: ...
    @property
    def step_limit_s(self) -> float: ...
    @property
    def thread_id(self) -> int | None: ...
    @property
    def steps(self) -> int: ...
    @property
    def busy(self) -> bool: ...

    def on_busy(self, tell: Callable[[], None]) -> None:
        """Call `tell`, which does not wait, whenever work comes to the resting thread."""


class Watchdog:
    """Watches threads from its beginning to its end, from a thread of its own; a context manager.

    wedged: called once, on that thread, with the thread that hangs and the reason in words. Nothing is watched after it.
    """

    def __init__(self, threads: Sequence[Watched], wedged: Callable[[Watched, str], None]) -> None:
        self._judges = [_Judge(thread) for thread in threads]
        self._wedged = wedged
        self._awake = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="omnistage-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if self._judges:
            for judge in self._judges:
                judge.thread.on_busy(self._wake)
            self._awake.set()
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._stopped.set()
        self._awake.set()

    def _wake(self) -> None:
        if not self._awake.is_set():
            self._awake.set()

    def _watch(self) -> None:
        while True:
            self._awake.wait()
            begun = time.monotonic()
            if self._stopped.wait(PERIOD_S):
                return
            self._awake.clear()  # Before the look: work that comes from here on is seen by it, or wakes this thread again.
            elapsed_s = time.monotonic() - begun
            for judge in self._judges:
                if reason := judge.look(elapsed_s):
                    self._wedged(judge.thread, reason)
                    return
            if any(judge.active for judge in self._judges):
                self._awake.set()


class _Judge:
    """What is known of one thread's present step. active: it had work at the last look, or did some before it."""

    def __init__(self, thread: Watched) -> None:
        self.thread = thread
        self.active = False
        self._steps = 0
        self._cpu_s: float | None = None
        self._still_s = 0.0
        self._step_s = 0.0

    def look(self, elapsed_s: float) -> str:
        """Judge what happened in the last `elapsed_s`; why the thread hangs, empty if it does not."""
        steps_before, self._steps = self._steps, self.thread.steps
        busy = self.thread.busy
        self.active = busy or self._steps != steps_before
        task = None if self.thread.thread_id is None or not busy else _task(self.thread.thread_id)
        cpu_before_s, self._cpu_s = self._cpu_s, None if task is None else task.cpu_s
        if task is None or cpu_before_s is None or self._steps != steps_before:
            self._still_s = self._step_s = 0.0
        elif task.cpu_s > cpu_before_s:
            self._still_s = 0.0
            self._step_s += task.cpu_s - cpu_before_s
        elif elapsed_s <= PERIOD_S + LATE_S and not _another_thread_is_runnable():
            self._step_s += elapsed_s
            # In state D it waits for a disk, which says nothing of the thread.
            self._still_s += elapsed_s if task.state == "S" else 0.0
        return self._verdict()

    def _verdict(self) -> str:
        if self._still_s >= STILL_S:
            return f"it has work and used no CPU for {self._still_s:.1f} s"
        if self._step_s > self.thread.step_limit_s:
            return f"the step took {self._step_s:.0f} s, and may take {self.thread.step_limit_s:g} s"
        return ""


@dataclass(frozen=True, slots=True)
class _Task:
    """A thread as the kernel sees it. state: R runs or waits for a CPU, S sleeps, D waits for a disk."""

    state: str
    cpu_s: float


def _task(thread_id: int) -> _Task | None:
    """A thread of this process, proc(5) stat; None if it has ended."""
    try:
        stat = (_TASKS / str(thread_id) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name may hold anything; after it come state (field 3) and, as fields 14 and 15, the ticks in user and kernel mode.
    fields = stat.rpartition(")")[2].split()
    return _Task(fields[0], (int(fields[11]) + int(fields[12])) * _TICK_S)


def _another_thread_is_runnable() -> bool:
    """Whether a thread of this process, but for the watchdog's own, has a CPU or waits for one: the watched one may wait for it."""
    own = threading.get_native_id()
    tasks = (_task(int(folder.name)) for folder in _TASKS.iterdir() if int(folder.name) != own)
    return any(task is not None and task.state == "R" for task in tasks)
