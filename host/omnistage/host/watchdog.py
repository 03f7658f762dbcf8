"""Finds out whether a process hangs: a computing thread that has work and does nothing, or an event loop that is blocked.

A thread hangs if it has work and, within one step, used no CPU for IDLE_S, or if one step took longer than its family allows. So that a
busy machine makes no thread look as if it hangs, some time does not count:
- Time before a look that came late: this process as a whole was held up (by a full machine, SIGSTOP, or a call that keeps Python's lock).
- Time in which the watched thread, or a thread that it may wait for, waited for a CPU, by the kernel's count (run delay).

A thread that waits for Python's lock is not idle: it wakes every few milliseconds and so uses a little CPU. A model's thread may sleep
while native threads compute for it, such as torch's pool, or threads of other processes that it names, such as the other ranks of
a model. It is not idle then either. Work of Python's other threads, such as the event loop, does not count for it. While no thread has
work, the watchdog sleeps.

The event loop is watched as one more thread, which counts as busy while it owes an answer. If the loop of a stage is blocked, other
processes notice its silence and use another replica. The process must end too, because no other router acts for this one, and a replica
is started anew only after it has ended. A process that asks whether the loop still runs gets its answer from `answering`."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

import structlog

from omnistage.host.background import SHORTAGES

log = structlog.get_logger(__name__)

PERIOD_S = 0.25
LATE_S = 0.1
"""If a look is later than this, in seconds, the time before it does not count."""
IDLE_S = 1.5


class Watched(Protocol):
    """A thread that computes. thread_id: its number in the kernel; None until it runs. steps: number of steps it has done. busy: it has
    work. step_limit_s: seconds that a step may take, without the time in which it waits for a CPU. helped: native threads may compute for
    it while it sleeps. processes: ids of other processes whose threads may compute for it too."""

    @property
    def name(self) -> str: ...
    @property
    def step_limit_s(self) -> float: ...
    @property
    def helped(self) -> bool: ...
    @property
    def processes(self) -> Sequence[int]: ...
    @property
    def thread_id(self) -> int | None: ...
    @property
    def steps(self) -> int: ...
    @property
    def busy(self) -> bool: ...

    def on_busy(self, tell: Callable[[], None]) -> None:
        """Call `tell`, which must not wait, whenever work comes to the resting thread."""


class Watchdog:
    """Watches threads from its beginning to its end, from a thread of its own; a context manager.

    wedged: called once, on the watchdog's thread, with the thread that hangs and the reason in words. Afterwards nothing is watched.
    """

    def __init__(self, threads: Sequence[Watched], wedged: Callable[[Watched, str], None]) -> None:
        self._judges = [_Judge(thread) for thread in threads]
        self._wedged = wedged
        self._awake = threading.Event()
        self._stopped = threading.Event()
        self._is_blind = False  # whether the last reading of the threads failed
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
        """Look at the threads every PERIOD_S while one of them has work, until one hangs or the watchdog ends."""
        threads: Mapping[int, KernelThread] = {}
        while True:
            self._awake.wait()
            threads = threads or self._read_threads()
            begin_s = time.monotonic()
            if self._stopped.wait(PERIOD_S):
                return
            self._awake.clear()  # Before the look, which sees all work until here; later work sets it anew.
            elapsed_s = time.monotonic() - begin_s  # Without the reading below, which takes long if others want Python's lock.
            before, threads = threads, self._read_threads()
            look = _look(before, threads, elapsed_s)
            for judge in self._judges:
                if reason := judge.judge(look):
                    self._wedged(judge.thread, reason)
                    return
            if any(judge.active for judge in self._judges):
                self._awake.set()
            elif not self._awake.is_set():
                threads = {}  # The next look would be too long after this one.

    def _read_threads(self) -> Mapping[int, KernelThread]:
        """All threads that matter, by number; empty if they cannot be read, for example because no descriptor is left: then no thread is
        judged."""
        try:
            threads = read_threads({"self", *(process for judge in self._judges for process in judge.thread.processes)})
        except SHORTAGES as error:
            if not self._is_blind:  # Once, not four times a second.
                log.warning("watchdog.sees_nothing", why=repr(error))
            self._is_blind = True
            return {}
        self._is_blind = False
        return threads


class _Judge:
    """Judges one thread at every look, and keeps the times of its present step. active: the thread had work at the last look, or did a step
    since the look before."""

    def __init__(self, thread: Watched) -> None:
        self.thread = thread
        self.active = False
        self._steps = 0
        self._measured = False  # whether the last look could measure the thread
        self._idle_s = 0.0  # of the present step, without use of a CPU
        self._step_s = 0.0  # of the present step, in all

    def judge(self, look: _Look) -> str:
        """Add up the times since the last look, or begin at 0 if a new step or new work has begun. Return why the thread hangs; empty if it
        does not."""
        steps_before, self._steps = self._steps, self.thread.steps
        busy = self.thread.busy
        self.active = busy or self._steps != steps_before
        use = None if self.thread.thread_id is None or not busy else look.uses.get(self.thread.thread_id)
        measured_before, self._measured = self._measured, use is not None
        if use is None or not measured_before or self._steps != steps_before:
            self._idle_s = self._step_s = 0.0
            return ""
        if use.cpu_s:
            self._idle_s = 0.0
        elif use.state == "S":  # In state D it waits for a disk, which says nothing about the thread.
            self._idle_s += look.idle_s if self.thread.helped else look.counted_s
        self._step_s += max(use.cpu_s, look.counted_s)
        return self._verdict()

    def _verdict(self) -> str:
        """Why the thread hangs; empty if it does not."""
        if self._idle_s >= IDLE_S:
            return f"it has work and used no CPU for {self._idle_s:.1f} s"
        if self._step_s > self.thread.step_limit_s:
            return f"the step took {self._step_s:.0f} s, and may take {self.thread.step_limit_s:g} s"
        return ""


@dataclass(frozen=True, slots=True)
class _Look:
    """The work of the threads of this process, and of the processes that help it, between two looks.

    uses: the times between the looks, by the kernel's number of a thread. counted_s: seconds in which none of the threads waited for a CPU.
    idle_s: seconds in which no native thread computed either.
    """

    uses: Mapping[int, KernelThread]
    counted_s: float
    idle_s: float


def _look(before: Mapping[int, KernelThread], after: Mapping[int, KernelThread], elapsed_s: float) -> _Look:
    """Compare two readings of the threads. elapsed_s: seconds between them; if the second came too late, none count."""
    uses = uses_between(before, after, elapsed_s)
    if elapsed_s > PERIOD_S + LATE_S:
        return _Look(uses, 0.0, 0.0)
    own_id = threading.get_native_id()
    python_ids = {thread.native_id for thread in threading.enumerate()}
    delay_s = max((use.delay_s for number, use in uses.items() if number != own_id), default=0.0)
    native = [use for number, use in uses.items() if number not in python_ids]
    # A thread that waits for a disk does something too; the kernel does not say for how long.
    native_s = max((elapsed_s if use.state == "D" else use.cpu_s + use.delay_s for use in native), default=0.0)
    return _Look(uses, max(elapsed_s - delay_s, 0.0), max(elapsed_s - max(delay_s, native_s), 0.0))


def uses_between(before: Mapping[int, KernelThread], after: Mapping[int, KernelThread], elapsed_s: float) -> dict[int, KernelThread]:
    """The times of all threads that are in both readings, and their states at the second. elapsed_s: seconds between the readings."""
    return {number: _use(before[number], task, elapsed_s) for number, task in after.items() if number in before}


def _use(before: KernelThread, after: KernelThread, elapsed_s: float) -> KernelThread:
    """The times of one thread between two readings, `elapsed_s` apart, and its state at the second."""
    cpu_s, delay_s = after.cpu_s - before.cpu_s, after.delay_s - before.delay_s
    # The kernel counts a wait for a CPU only at its end. A thread that could run and did not is waiting now. Where delays are not counted,
    # a thread that could run may have waited even if it ran too.
    waits = after.state == "R" and not delay_s and (not cpu_s or not DELAYS_ARE_TOLD)
    return KernelThread(after.state, cpu_s, elapsed_s if waits else delay_s)


QUESTION_PERIOD_S = 2.0
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
            while not self._stopped.wait(QUESTION_PERIOD_S) and not answered.is_set():
                if time.monotonic() >= asked_s + PATIENCE_S:
                    self._wait(answered)
            self.answers += 1

    def _wait(self, answered: threading.Event) -> None:
        """Wait for an answer that is late, which wakes this thread as soon as it comes. Meanwhile the loop counts as busy."""
        self.busy = True
        self._tell()
        while not (answered.wait(QUESTION_PERIOD_S) or self._stopped.is_set()):
            pass
        self.steps += 1
        self.busy = False


_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class KernelThread:
    """A thread as the kernel sees it. state: R runs or waits for a CPU, S sleeps, D waits for a disk. cpu_s: seconds that it has run.
    delay_s: seconds that it has waited for a CPU."""

    state: str
    cpu_s: float
    delay_s: float


def read_threads(processes: Iterable[int | str]) -> dict[int, KernelThread]:
    """The threads of processes, by thread number. processes: their ids; "self" is this one. Raises OSError if they cannot be read, for
    example because no descriptor is left."""
    threads = (folder for process in processes for folder in _folders(Path(f"/proc/{process}/task")))
    return {int(folder.name): thread for folder in threads if (thread := _thread(folder)) is not None}


def _folders(tasks: Path) -> list[Path]:
    """The folders of a process's threads; none if the process has ended."""
    try:
        return list(tasks.iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return []


def _thread(folder: Path) -> KernelThread | None:
    """Read a thread from its folder /proc/PID/task/NUMBER, proc(5) stat and schedstat; None if it has ended."""
    try:
        stat = (folder / "stat").read_text()
        if DELAYS_ARE_TOLD:
            cpu_ns, delay_ns, _ = (folder / "schedstat").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name may hold anything. `fields` begins after it, with field 3, the state. Fields 14 and 15 are the ticks in user and kernel mode.
    fields = stat.rpartition(")")[2].split()
    if DELAYS_ARE_TOLD:
        return KernelThread(fields[0], int(cpu_ns) / 1e9, int(delay_ns) / 1e9)
    return KernelThread(fields[0], (int(fields[11]) + int(fields[12])) * _TICK_S, 0.0)


def _delays_are_told() -> bool:
    """Whether this kernel counts how long threads wait for a CPU. A kernel that does not has no such file, or zeros in it."""
    try:
        return Path("/proc/self/schedstat").read_text().split()[0] != "0"
    except OSError:
        return False


DELAYS_ARE_TOLD = _delays_are_told()
"""Whether this kernel counts delays. If not, run times are whole ticks of the kernel's clock, and delays are 0."""


_MAX_QUESTIONS = 4096
"""Largest number of bytes read at a time. Each byte is a question; one byte answers all of them."""


@contextmanager
def answering(fd: int) -> Iterator[None]:
    """Have the event loop answer questions on the socket with the descriptor `fd` while the block runs. The process that started this one
    asks whether the loop still runs. If `fd` is negative, nobody asks. `fd` stays open: the line of a failed start goes there too."""
    if fd < 0:
        yield
        return
    loop = asyncio.get_running_loop()
    with socket.socket(fileno=os.dup(fd)) as connection:
        connection.setblocking(False)

        def answer() -> None:
            try:
                if connection.recv(_MAX_QUESTIONS):
                    connection.send(b"!")
                    return
            except BlockingIOError:  # Nobody has read the answers for long: the asking process was stopped.
                return
            except OSError:
                pass
            loop.remove_reader(connection)  # The asking process is gone.

        loop.add_reader(connection, answer)
        try:
            yield
        finally:
            loop.remove_reader(connection)
