"""The watchdog finds a thread that hangs. It leaves threads alone that compute, wait for a CPU, rest, or take many small steps."""

from __future__ import annotations

import _thread
import ctypes
import hashlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import pytest

from helpers.processes import busy_cores
from omnistage.engine.types import Activity
from omnistage.host import watchdog
from omnistage.host.watchdog import IDLE_S, PERIOD_S, Watchdog

LIMIT_S = 60.0
LONG_S = 2.5 * IDLE_S
HASHES = 20_000
"""Rounds that take some hundredths of a second, without Python's lock."""


class SteppedThread:
    """A thread that does the steps which the test gives it."""

    def __init__(self, step_limit_s: float = 600.0) -> None:
        self.activity = Activity("worker", step_limit_s)
        self._changed = threading.Condition()
        self._steps: list[Callable[[], object]] = []
        self._open = True
        self.done = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def do(self, step: Callable[[], object]) -> None:
        with self._changed:
            self._steps.append(step)
            self.activity.begin()
            self._changed.notify()

    def finished(self) -> None:
        assert self.done.acquire(timeout=LIMIT_S)

    def close(self) -> None:
        with self._changed:
            self._open = False
            self._changed.notify()
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        self.activity.enter()
        while True:
            with self._changed:
                while not self._steps:
                    self.activity.rest()
                    if not self._open:
                        return
                    self._changed.wait()
                step = self._steps.pop(0)
            step()
            self.activity.step()
            self.done.release()


@contextmanager
def watched(worker: SteppedThread) -> Iterator[Future[str]]:
    """A future that is done with the reason when the worker was said to hang."""
    verdict: Future[str] = Future()
    with Watchdog([worker.activity], lambda thread, reason: verdict.set_result(f"{thread.name}: {reason}")):
        yield verdict
    worker.close()


def assert_left_alone(step: Callable[[], object], worker: SteppedThread | None = None, *others: int) -> None:
    """A thread with this step is not said to hang. others: processes that it may wait for."""
    worker = worker or SteppedThread()
    worker.activity.processes = others
    with watched(worker) as verdict:
        worker.do(step)
        worker.finished()
        assert not verdict.done()


def compute(until: Callable[[], bool]) -> None:
    """A step that takes all of the CPU that it gets."""
    while not until():
        hashlib.pbkdf2_hmac("sha256", b"step", b"", HASHES)


def compute_for_long() -> None:
    end_s = time.monotonic() + LONG_S
    compute(lambda: time.monotonic() > end_s)


def compute_much() -> None:
    """A step as long as it takes to get so much of a CPU."""
    end_s = time.thread_time() + LONG_S
    compute(lambda: time.thread_time() > end_s)


def take_and_give_the_lock_for_long() -> None:
    """The step gives Python's lock back and wants it again a thousand times a second, as a step of many small products does."""
    end_s = time.monotonic() + LONG_S
    while time.monotonic() < end_s:
        Path("/").stat()


@contextmanager
def spinning(pause_s: float = 0.0) -> Iterator[None]:
    """A thread of Python that computes without a pause, as an event loop does in a flood, or rests in between."""
    stopped = threading.Event()

    def spin() -> None:
        while not stopped.is_set():
            if pause_s:
                stopped.wait(pause_s)
            sum(range(20_000))

    spinner = threading.Thread(target=spin)
    spinner.start()
    yield
    stopped.set()
    spinner.join()


@contextmanager
def native(compute: Callable[[], None]) -> Iterator[Callable[[], object]]:
    """A thread that `threading` does not know, such as one of a library in C; waits for its end."""
    done = threading.Event()

    def run() -> None:
        compute()
        done.set()

    _thread.start_new_thread(run, ())
    yield done.wait
    assert done.wait(LIMIT_S)


def looks(count: int) -> float:
    """The seconds that this many looks of the watchdog take."""
    return count * PERIOD_S


@pytest.mark.parametrize("first", [0, 3])
def test_a_thread_that_sleeps_in_its_step_hangs(first: int):
    worker, go = SteppedThread(), threading.Event()
    with watched(worker) as verdict:
        for _ in range(first):
            worker.do(lambda: None)
            worker.finished()
        worker.do(go.wait)
        assert verdict.result(LIMIT_S).startswith("worker: it has work and used no CPU")
        assert worker.activity.steps == first
        go.set()


def test_a_thread_that_waits_for_a_lock_in_its_step_hangs():
    worker, lock = SteppedThread(), threading.Lock()
    with watched(worker) as verdict:
        with lock:
            worker.do(lock.acquire)
            assert "used no CPU" in verdict.result(LIMIT_S)
        worker.finished()


def test_a_step_that_computes_longer_than_it_may_hangs():
    worker = SteppedThread(step_limit_s=0.5)
    with watched(worker) as verdict:
        worker.do(lambda: compute(verdict.done))
        assert "may take 0.5 s" in verdict.result(LIMIT_S)


def test_a_thread_that_computes_for_long_does_not_hang():
    assert_left_alone(compute_for_long)


def test_a_thread_that_takes_small_steps_and_sleeps_does_not_hang():
    worker = SteppedThread()
    with watched(worker) as verdict:
        for _ in range(12):
            worker.do(lambda: time.sleep(PERIOD_S))
        for _ in range(12):
            worker.finished()
        assert not verdict.done()


@pytest.mark.serial
def test_on_a_full_machine_neither_a_long_step_nor_one_that_waits_for_a_thread_hangs():
    """Each thread gets a fifth of a core or less. The limit of a step counts the step's own time. The step may wait for any thread of the
    process: here for a thread of Python, which is no excuse while it has a CPU."""
    computing, joining = SteppedThread(step_limit_s=0.6 * LONG_S), SteppedThread()
    helper = threading.Thread(target=compute_for_long)
    with busy_cores(), watched(computing) as one, watched(joining) as other:
        helper.start()
        computing.do(compute_for_long)
        joining.do(helper.join)
        computing.finished()
        joining.finished()
        assert not one.done() and not other.done()


@pytest.mark.parametrize("pause_s", [0.0, 0.002])
def test_a_thread_that_hangs_beside_a_busy_event_loop_hangs(pause_s: float):
    worker, go = SteppedThread(), threading.Event()
    with watched(worker) as verdict, spinning(pause_s):
        worker.do(go.wait)
        assert "used no CPU" in verdict.result(LIMIT_S)
        go.set()


def test_a_step_that_only_ever_wakes_and_sleeps_hangs():
    """The thread uses a CPU in every look, but hardly any of it."""
    worker, go = SteppedThread(step_limit_s=1.0), threading.Event()

    def wait_in_pieces() -> None:
        while not go.wait(PERIOD_S / 10):
            pass

    with watched(worker) as verdict, spinning():
        worker.do(wait_in_pieces)
        assert "may take 1 s" in verdict.result(LIMIT_S)
        go.set()


def test_a_thread_that_shares_pythons_lock_with_a_busy_one_does_not_hang():
    """The thread waits for the lock almost all of the time, and uses hundredths of a CPU."""
    with spinning():
        assert_left_alone(take_and_give_the_lock_for_long)


def test_a_thread_whose_native_helper_computes_does_not_hang():
    """So does a thread of torch that waits for the others of its pool."""
    with native(compute_much) as join:
        assert_left_alone(join)


@pytest.mark.parametrize("computes", [True, False])
def test_a_thread_that_waits_for_another_process_hangs_when_that_does_nothing(computes: bool):
    """So does one of several ranks of a model: the other ranks compute, or hang."""
    code = f"import time; end = time.process_time() + {LONG_S}\nwhile time.process_time() < end: pass" if computes else "input()"
    worker = SteppedThread()
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as other:
        if computes:
            assert_left_alone(other.wait, worker, other.pid)
            return
        worker.activity.processes = (other.pid,)
        with watched(worker) as verdict:
            worker.do(other.wait)
            assert "used no CPU" in verdict.result(LIMIT_S)
            assert other.poll() is None
            other.kill()


def test_a_thread_that_waits_for_a_process_that_waits_for_a_disk_does_not_hang():
    """The state is the same for a thread that called vfork, until the child ends."""
    code = f"import ctypes, time; libc = ctypes.PyDLL(None); libc.vfork() or (libc.usleep({int(LONG_S * 1e6)}), libc._exit(0))"
    with subprocess.Popen([sys.executable, "-c", code]) as other:
        assert_left_alone(other.wait, None, other.pid)


def test_a_call_that_keeps_pythons_lock_makes_nobody_hang():
    """All threads of the process are held up then, the watchdog too: its look comes late, and finds a thread that did nothing."""
    worker, begun, go = SteppedThread(), threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        go.wait()

    with watched(worker) as verdict:
        worker.do(wait)
        assert begun.wait(LIMIT_S)
        time.sleep(looks(2))
        ctypes.PyDLL(None).usleep(int(LONG_S * 1e6))
        time.sleep(looks(1))
        go.set()
        worker.finished()
        assert not verdict.done()


def test_a_thread_without_work_is_left_alone_and_costs_nothing():
    """The watchdog sleeps: it does not run once while another thread waits for ten of its looks."""
    worker = SteppedThread()
    before = {folder.name for folder in Path("/proc/self/task").iterdir()}
    with watched(worker) as verdict:
        (own,) = {folder.name for folder in Path("/proc/self/task").iterdir()} - before
        worker.do(lambda: None)
        worker.finished()
        time.sleep(looks(4))
        runs = _runs(own)
        time.sleep(looks(10))
        assert _runs(own) == runs and not verdict.done()
        worker.do(lambda: time.sleep(looks(2)))
        worker.finished()
        assert _runs(own) > runs


def _runs(task: str) -> int:
    """How often a thread of this process has gone to sleep."""
    status = Path(f"/proc/self/task/{task}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("voluntary_ctxt_switches"))


def test_where_the_kernel_counts_no_waits_a_hang_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watchdog, "DELAYS_ARE_TOLD", False)
    test_a_thread_that_sleeps_in_its_step_hangs(1)


def test_where_the_kernel_counts_no_waits_whoever_runs_may_wait_for_a_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watchdog, "DELAYS_ARE_TOLD", False)
    helper = threading.Thread(target=compute_for_long)
    helper.start()
    assert_left_alone(helper.join)


def test_the_time_before_the_first_look_that_can_measure_a_thread_counts_for_no_step() -> None:
    activity = Activity("worker")
    activity.enter()
    activity.begin()
    judge = watchdog._Judge(activity)
    look = watchdog._Look({threading.get_native_id(): watchdog.KernelThread("S", 0.0, 0.0)}, counted_s=IDLE_S, idle_s=IDLE_S)
    assert judge.judge(look) == ""
    assert judge.judge(look) == f"it has work and used no CPU for {IDLE_S:.1f} s"
