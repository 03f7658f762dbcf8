"""The compute thread: order, fairness, cancelling."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator
from functools import partial

import numpy as np
import pytest

from helpers.waiting import until
from omnistage.models.worker import OVERTAKES, Worker, by_two


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    one = Worker("test", threads=1)
    yield one
    await one.close()


class GatedUnit:
    """A unit of work that runs until it is let go."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.go = threading.Event()
        self.left = False

    def __call__(self) -> str:
        self.entered.set()
        assert self.go.wait(60)
        self.left = True
        return "done"

    async def running(self) -> None:
        await asyncio.to_thread(self.entered.wait, 60)


async def test_returns_the_result_and_raises_the_error(worker: Worker) -> None:
    assert await worker.run(lambda: threading.current_thread().name) == "test"
    with pytest.raises(ZeroDivisionError):
        await worker.run(lambda: 1 // 0)
    assert await worker.run(lambda: 7) == 7


async def test_urgent_units_overtake_a_bounded_number(worker: Worker) -> None:
    gate, order = GatedUnit(), list[str]()
    holding = asyncio.create_task(worker.run(gate))
    await gate.running()
    async with asyncio.TaskGroup() as group:
        for index in range(OVERTAKES + 2):
            group.create_task(worker.run(partial(order.append, f"late {index}")))
        await asyncio.sleep(0)
        group.create_task(worker.run(lambda: order.append("urgent"), urgent=True))
        await asyncio.sleep(0)
        assert worker.queued == OVERTAKES + 3
        gate.go.set()
    assert await holding == "done"
    assert order.index("urgent") == len(order) - OVERTAKES
    assert [entry for entry in order if entry != "urgent"] == [f"late {index}" for index in range(OVERTAKES + 2)]


async def test_cancelled_unit_in_the_queue_never_runs(worker: Worker) -> None:
    gate, ran = GatedUnit(), list[int]()
    holding = asyncio.create_task(worker.run(gate))
    await gate.running()
    waiting = asyncio.create_task(worker.run(lambda: ran.append(1)))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert worker.queued == 0
    gate.go.set()
    await holding
    assert await worker.run(lambda: ran) == []


async def test_two_threads_share_work_and_both_are_done_when_one_fails(worker: Worker) -> None:
    """Neither is left with what the other one has given up."""
    threads = dict[str, str]()

    def note(who: str) -> None:
        threads[who] = threading.current_thread().name

    await asyncio.to_thread(by_two, worker.aside, partial(note, "here"), partial(note, "there"))
    assert threads["there"] == "test" != threads["here"]
    gate = GatedUnit()

    def held() -> None:
        gate()

    def fail() -> None:
        assert gate.entered.wait(60)
        raise ZeroDivisionError

    failing = asyncio.create_task(asyncio.to_thread(by_two, worker.aside, fail, held))
    await gate.running()
    assert not (await asyncio.wait({failing}, timeout=0.5))[0] and not gate.left
    gate.go.set()
    with pytest.raises(ZeroDivisionError):
        await failing
    assert gate.left
    with pytest.raises(ZeroDivisionError):
        await asyncio.to_thread(by_two, worker.aside, lambda: None, fail)


async def test_cancelling_waits_for_the_unit_that_runs(worker: Worker) -> None:
    gate = GatedUnit()
    task = asyncio.create_task(worker.run(gate))
    await gate.running()
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
    gate.go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gate.left


async def test_what_a_unit_worked_on_is_gone_when_nothing_follows(worker: Worker) -> None:
    film = np.zeros(1000)
    held = weakref.ref(film)
    assert await worker.run(partial(np.sum, film)) == 0
    del film
    await until(lambda: held() is None)


async def test_closed_worker_refuses_work() -> None:
    worker = Worker("test", threads=1)
    await worker.close()
    with pytest.raises(RuntimeError, match="closed"):
        await worker.run(lambda: None)


async def test_work_that_raises_what_no_future_takes_is_an_error_too(worker: Worker) -> None:
    def ended() -> None:
        next(iter(()))

    with pytest.raises(RuntimeError, match="StopIteration") as raised:
        await worker.run(ended)
    assert isinstance(raised.value.__cause__, StopIteration)
