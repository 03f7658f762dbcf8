"""The compute thread: order, fairness, cancelling; and one thing that is made while another is looked at."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from functools import partial

import numpy as np
import pytest

from helpers.waiting import until
from omnistage.models.worker import OVERTAKES, Worker, by_two, make_ahead


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


# Made ahead --------------------------------------------------------------------------------------------------------------------------


class NumberSource:
    """Numbers. made: so many were asked for."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self.count, self.error, self.made, self.closed = count, error, 0, False

    async def numbers(self) -> AsyncGenerator[int, None]:
        try:
            for number in range(self.count):
                self.made = number + 1
                await asyncio.sleep(0)
                yield number
            if self.error is not None:
                raise self.error
        finally:
            await asyncio.sleep(0)
            self.closed = True


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_made_ahead_is_what_the_source_gives() -> None:
    for count in (0, 1, 2, 30):
        source = NumberSource(count)
        assert [number async for number in make_ahead(source.numbers())] == list(range(count))
        assert source.closed


async def test_the_next_is_made_while_one_is_looked_at_and_none_behind_it() -> None:
    source = NumberSource(30)
    async with aclosing(make_ahead(source.numbers())) as made:
        for number in range(10):
            assert await anext(made) == number
            await turns()
            assert source.made == number + 2
    assert source.closed and source.made == 11


async def test_an_error_comes_behind_what_was_made() -> None:
    source = NumberSource(3, ArithmeticError("three"))
    seen = list[int]()
    with pytest.raises(ArithmeticError, match="three"):
        async for number in make_ahead(source.numbers()):
            seen.append(number)
            await turns()
    assert seen == [0, 1, 2] and source.closed


async def test_who_leaves_leaves_nothing_that_was_made_ahead() -> None:
    source = NumberSource(30)
    async with aclosing(make_ahead(source.numbers())) as made:
        await anext(made)
    assert source.closed and len(asyncio.all_tasks()) == 1


async def test_two_in_a_row_make_two_ahead() -> None:
    source = NumberSource(30)
    async with aclosing(make_ahead(source.numbers())) as one, aclosing(make_ahead(one)) as two:
        assert await anext(two) == 0
        await turns()
        assert source.made == 3


async def test_the_source_is_closed_whatever_is_cancelled() -> None:
    """A source that takes its time to close."""
    closing, may_close, closed = asyncio.Event(), asyncio.Event(), False

    async def slow() -> AsyncGenerator[int, None]:
        nonlocal closed
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            closing.set()
            await may_close.wait()
            closed = True

    async def look() -> None:
        async with aclosing(make_ahead(slow())) as made:
            async for _ in made:
                pass

    looking = asyncio.create_task(look())
    await turns()
    for _ in range(3):
        looking.cancel()
        await turns()
    assert closing.is_set() and not looking.done()
    may_close.set()
    with pytest.raises(asyncio.CancelledError):
        await looking
    assert closed
