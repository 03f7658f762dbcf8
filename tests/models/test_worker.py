"""The compute thread: order, fairness, cancelling; one thing that is made while another is looked at. The memory and the cores that a
process takes."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.waiting import until
from omnistage.models.devices import cores
from omnistage.models.memory import FILLED, LruCache, TensorCache, free_bytes, part_of_cpu, part_of_gpu
from omnistage.models.reports import bytes_told
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


GIB = 1 << 30
TOTAL = 80 * GIB
WEIGHTS = 7 * GIB


def taken(order: list[int], device: str, share: float) -> dict[int, int]:
    """The memory that each server takes. order: a server comes first when its weights are loaded, and again when it measures and takes."""
    free, loaded, found = TOTAL, set[int](), dict[int, int]()
    for server in order:
        if server not in loaded:
            loaded.add(server)
            free -= WEIGHTS
        else:
            part = part_of_gpu(free, TOTAL, WEIGHTS, FILLED, share) if device == "cuda" else part_of_cpu(free, WEIGHTS, share)
            found[server] = part
            free -= part
    return found


@pytest.mark.parametrize("servers", [1, 2, 3, 5])
def test_no_order_of_starts_takes_more_than_there_is(servers: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        order = rng.sample([*range(servers)] * 2, 2 * servers)
        on_gpu, on_cpu = (taken(order, device, 1 / servers) for device in ("cuda", "cpu"))
        assert sum(on_gpu.values()) + servers * WEIGHTS <= FILLED * TOTAL
        assert len({part // 1024 for part in on_gpu.values()}) == 1, "equal servers have equal parts of a GPU"
        assert on_gpu[0] + WEIGHTS >= FILLED * TOTAL / servers - 1
        assert sum(on_cpu.values()) + servers * WEIGHTS <= TOTAL
        assert min(on_cpu.values()) >= 0


def test_without_a_share_two_would_both_take_all() -> None:
    first, second = taken([0, 1, 0, 1], "cuda", 1.0).values()
    assert first + 2 * WEIGHTS > 0.8 * TOTAL and second < GIB


def test_a_gpu_that_others_use_has_what_is_left() -> None:
    free = 20 * GIB
    assert part_of_gpu(free, TOTAL, WEIGHTS, 0.9, 0.5) == int(free - (1 - 0.9) * TOTAL)
    assert part_of_gpu(4 * GIB, TOTAL, WEIGHTS, 0.9, 0.5) == 0


def test_a_share_of_this_machine_is_a_part_of_what_is_free() -> None:
    whole, half = free_bytes("cpu"), free_bytes("cpu", share=0.5)
    assert 0.25 * whole < half < 0.75 * whole


@pytest.mark.parametrize(
    ("size", "told"),
    [
        *((0, "0 B"), (5, "5 B"), (1023, "1023 B"), (2048, "2 KiB"), ((1 << 20) - 1, "1024 KiB"), (3 << 20, "3 MiB")),
        *((12_340_000, "11.77 MiB"), (3 << 29, "1.5 GiB"), (1 << 60, "1073741824 GiB")),
    ],
)
def test_bytes_are_told_with_their_unit(size: int, told: str) -> None:
    assert bytes_told(size) == told


# Caches ------------------------------------------------------------------------------------------------------------------------------


def test_what_is_kept_longest_without_use_goes_first() -> None:
    kept = TensorCache(max_bytes=12)
    made = list[str]()

    def make(name: str, size: int = 1) -> torch.Tensor:
        made.append(name)
        return torch.full((size,), float(len(made)))

    for name in ("a", "b", "c", "a", "d", "a", "b"):
        kept.get(name, partial(make, name))
    assert made == ["a", "b", "c", "d", "b"], "a was used again, b and c were not"
    assert kept.get("large", partial(make, "large", 4)).nbytes == 16 and kept.bytes == 12, "what does not fit drives nothing out"


def test_a_value_that_is_kept_again_counts_once() -> None:
    kept = LruCache[torch.Tensor](max_bytes=12)
    for size in (1, 2, 1):
        kept.keep("a", torch.zeros(size))
    assert kept.bytes == 4 and kept.find("b") is None and kept.hits == 0
    kept.keep("b", torch.zeros(2))
    assert kept.find("a") is not None and kept.bytes == 12
    kept.keep("c", torch.zeros(1))
    assert [kept.find(name) is not None for name in "abc"] == [True, False, True] and kept.bytes == 8


def test_a_view_is_kept_without_what_it_is_a_part_of() -> None:
    whole = torch.zeros(100)
    kept, none = TensorCache(max_bytes=12), TensorCache(max_bytes=0)
    assert kept.get("row", lambda: whole[:2]).untyped_storage().nbytes() == 8
    assert none.get("row", lambda: whole[:2]).data_ptr() == whole.data_ptr(), "what is not kept is not copied"


# Cores -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quota", "least"), [("max 100000", 1 << 20), ("150000 100000", 1), ("50000 100000", 1), ("200000 100000", 2), ("9900000 100000", 99)]
)
def test_a_container_may_have_fewer(tmp_path: Path, quota: str, least: int) -> None:
    (tmp_path / "cpu.max").write_text(quota + "\n")
    assert cores(tmp_path / "cpu.max") == min(least, len(os.sched_getaffinity(0)))


def test_without_containers_it_is_what_the_process_may_run_on(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert cores(tmp_path / "none") == 1
    finally:
        os.sched_setaffinity(0, allowed)
