"""A thread that hangs is found, and none else: not one that computes, waits for a CPU, rests, or takes many small steps."""

from __future__ import annotations

import ctypes
import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import pytest

from helpers.busy import busy_cores
from omnistage.engine.activity import Activity
from omnistage.host.watchdog import PERIOD_S, STILL_S, Watchdog

LIMIT_S = 60.0
LONG_S = 2.5 * STILL_S
HASHES = 20_000
"""Rounds that take some hundredths of a second, without Python's lock."""


class Worker:
    """A thread that does steps, each given by the test."""

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
def watched(worker: Worker) -> Iterator[Future[str]]:
    """Done with the reason when the worker was said to hang."""
    verdict: Future[str] = Future()
    with Watchdog([worker.activity], lambda thread, reason: verdict.set_result(f"{thread.name}: {reason}")):
        yield verdict
    worker.close()


def compute(until: Callable[[], bool]) -> None:
    """One step that takes all of the CPU that it gets."""
    while not until():
        hashlib.pbkdf2_hmac("sha256", b"step", b"", HASHES)


def compute_for_long() -> None:
    end_s = time.monotonic() + LONG_S
    compute(lambda: time.monotonic() > end_s)


def looks(count: int) -> float:
    """Seconds in which the watchdog looks so often."""
    return count * PERIOD_S


@pytest.mark.parametrize("first", [0, 3])
def test_a_thread_that_sleeps_in_its_step_hangs(first: int):
    worker, go = Worker(), threading.Event()
    with watched(worker) as verdict:
        for _ in range(first):
            worker.do(lambda: None)
            worker.finished()
        worker.do(go.wait)
        assert verdict.result(LIMIT_S).startswith("worker: it has work and used no CPU")
        assert worker.activity.steps == first
        go.set()


def test_a_thread_that_waits_for_a_lock_in_its_step_hangs():
    worker, lock = Worker(), threading.Lock()
    with watched(worker) as verdict:
        with lock:
            worker.do(lock.acquire)
            assert "used no CPU" in verdict.result(LIMIT_S)
        worker.finished()


def test_a_step_that_computes_longer_than_it_may_hangs():
    worker = Worker(step_limit_s=0.5)
    with watched(worker) as verdict:
        worker.do(lambda: compute(verdict.done))
        assert "may take 0.5 s" in verdict.result(LIMIT_S)


def test_a_thread_that_computes_for_long_does_not_hang():
    worker = Worker()
    with watched(worker) as verdict:
        worker.do(compute_for_long)
        worker.finished()
        assert not verdict.done()


def test_a_thread_that_takes_small_steps_and_sleeps_does_not_hang():
    worker = Worker()
    with watched(worker) as verdict:
        for _ in range(12):
            worker.do(lambda: time.sleep(PERIOD_S))
        for _ in range(12):
            worker.finished()
        assert not verdict.done()


@pytest.mark.slow
@pytest.mark.serial
def test_on_a_full_machine_a_long_step_does_not_hang():
    """The step gets a fifth of a core or less. What it may take is its own time."""
    worker = Worker(step_limit_s=0.6 * LONG_S)
    with busy_cores(), watched(worker) as verdict:
        worker.do(compute_for_long)
        worker.finished()
        assert not verdict.done()


def test_a_thread_whose_helper_computes_does_not_hang():
    """As a thread of torch that waits for the others of its pool."""
    worker = Worker()
    helper = threading.Thread(target=compute_for_long)
    with watched(worker) as verdict:
        helper.start()
        worker.do(helper.join)
        worker.finished()
        assert not verdict.done()


def test_a_call_that_keeps_pythons_lock_makes_nobody_hang():
    """All threads of the process are held up then, the watchdog too."""
    worker, go = Worker(), threading.Event()
    with watched(worker) as verdict:
        worker.do(go.wait)
        ctypes.PyDLL(None).usleep(int(LONG_S * 1e6))
        go.set()
        worker.finished()
        assert not verdict.done()


def test_a_thread_without_work_is_left_alone_and_costs_nothing():
    """The watchdog sleeps: it is not run once while another thread waits for ten of its looks."""
    worker = Worker()
    before = {folder.name for folder in Path("/proc/self/task").iterdir()}
    with watched(worker) as verdict:
        (own,) = {folder.name for folder in Path("/proc/self/task").iterdir()} - before
        worker.do(lambda: None)
        worker.finished()
        time.sleep(looks(4))
        runs = _runs(own)
        time.sleep(looks(10))
        assert _runs(own) == runs
        assert not verdict.done()
        worker.do(lambda: time.sleep(looks(2)))
        worker.finished()
        assert _runs(own) > runs


def _runs(task: str) -> int:
    """How often a thread of this process has slept."""
    status = Path(f"/proc/self/task/{task}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("voluntary_ctxt_switches"))
