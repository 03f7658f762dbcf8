"""Steps of many jobs on few threads: each job steps until it is done, once at a time, and who is due first goes first."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from helpers.waiting import until
from omnistage.models.common.due import DueQueue, chosen
from omnistage.models.common.worker import Aside, Worker
from omnistage.models.interface import Batches, Load


class Counted:
    """A job of so many steps. Its shape changes with each."""

    def __init__(self, steps: int, kind: str = "") -> None:
        self.left, self.kind, self.inside = steps, kind, threading.Lock()

    @property
    def done(self) -> bool:
        return self.left == 0

    @property
    def shape(self) -> tuple[str, int]:
        return self.kind, self.left % 2


class Steps:
    """What a step does: counts down, and writes down who was in it, and whether there was a second thread. It waits for `go`."""

    def __init__(self, most: int = 4, fails: str = "") -> None:
        self.most, self.fails = most, fails
        self.groups = list[tuple[Sequence[Counted], bool]]()
        self.go, self.inside, self.side_by_side = threading.Event(), 0, 0
        self._lock = threading.Lock()
        self.go.set()

    def __call__(self, jobs: Sequence[Counted], aside: Aside | None) -> None:
        assert len({job.shape for job in jobs}) == 1
        with self._lock:
            self.groups.append((jobs, aside is not None))
            self.inside += 1
            self.side_by_side = max(self.side_by_side, self.inside)
        try:
            for job in jobs:
                assert job.inside.acquire(blocking=False), "a job is in two steps at once"
            assert self.go.wait(60)
            if self.fails and any(job.kind == self.fails for job in jobs):
                raise ArithmeticError(self.fails)
            if aside is not None:
                aside(lambda: None).result(60)
            for job in jobs:
                job.left -= 1
        finally:
            for job in jobs:
                job.inside.release()
            with self._lock:
                self.inside -= 1


@asynccontextmanager
async def queue_of(steps: Steps, workers: int, halves: bool = True) -> AsyncIterator[DueQueue[Counted]]:
    made = [Worker(f"test {number}", 1) for number in range(workers)]
    try:
        yield DueQueue[Counted](made, steps, lambda job: job.shape, lambda _, there: min(there, steps.most), lambda _: halves)
    finally:
        for worker in made:
            await worker.close()


@pytest.mark.parametrize("workers", [1, 2, 3])
async def test_every_job_is_stepped_to_its_end(workers: int, seed: int) -> None:
    source, steps = random.Random(seed), Steps()
    jobs = [Counted(source.randint(1, 30), source.choice("ab")) for _ in range(40)]
    async with queue_of(steps, workers) as queue:

        async def come(job: Counted) -> None:
            for _ in range(source.randint(0, 20)):
                await asyncio.sleep(0)
            await queue.run(job, source.random())
            assert job.done

        asked = sum(job.left for job in jobs)
        await asyncio.gather(*map(come, jobs))
        assert queue.load == Load(queued=0, batches=Batches(len(steps.groups), asked))
    assert sum(len(group) for group, _ in steps.groups) == asked and steps.side_by_side <= workers


async def test_jobs_are_spread_before_they_are_put_together() -> None:
    steps = Steps()
    steps.go.clear()
    async with queue_of(steps, 2) as queue:
        running = [asyncio.create_task(queue.run(Counted(1), 0)) for _ in range(6)]
        # The first one came alone, and had both threads.
        await until(lambda: len(steps.groups) == 1 and queue.waiting == 6)
        steps.go.set()
        await asyncio.gather(*running)
    assert sorted((len(group), aside) for group, aside in steps.groups) == [(1, True), (2, False), (3, False)]


async def test_two_threads_step_side_by_side() -> None:
    steps = Steps()
    steps.go.clear()
    async with queue_of(steps, 2, halves=False) as queue:
        running = [asyncio.create_task(queue.run(Counted(1), 0)) for _ in range(3)]
        await until(lambda: steps.inside == 2)
        assert [len(group) for group, _ in steps.groups] == [1, 1] and queue.waiting == 3
        steps.go.set()
        await asyncio.gather(*running)


async def test_who_is_alone_has_a_second_thread() -> None:
    steps = Steps()
    async with queue_of(steps, 2) as queue:
        await queue.run(Counted(5), 0)
    assert [aside for _, aside in steps.groups] == [True] * 5
    plain = Steps()
    async with queue_of(plain, 2, halves=False) as queue:
        await queue.run(Counted(5), 0)
    assert [aside for _, aside in plain.groups] == [False] * 5


async def test_who_is_due_goes_first() -> None:
    steps, late, soon = Steps(most=1), Counted(1, "late"), Counted(1, "soon")
    steps.go.clear()
    async with queue_of(steps, 1) as queue:
        running = [asyncio.create_task(queue.run(Counted(1), 0))]
        await until(lambda: bool(steps.groups))
        running += [asyncio.create_task(queue.run(job, due)) for job, due in ((late, 9.0), (soon, 1.0))]
        await until(lambda: queue.waiting == 3)
        steps.go.set()
        await asyncio.gather(*running)
    assert [group[0].kind for group, _ in steps.groups] == ["", "soon", "late"]


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_step_that_fails_harms_no_other_job(workers: int) -> None:
    """Put together with others it is found out."""
    steps = Steps(fails="bad")
    steps.go.clear()
    async with queue_of(steps, workers) as queue:
        holding = asyncio.create_task(queue.run(Counted(1, "first"), 0))
        await until(lambda: len(steps.groups) == 1)
        shaped = [Counted(3, "bad") if number == 2 else Counted(3, "good") for number in range(5)]
        running = [asyncio.create_task(queue.run(job, 1)) for job in shaped]
        await until(lambda: queue.waiting == 6)
        steps.go.set()
        ends = await asyncio.gather(*running, return_exceptions=True)
        await holding
        assert [type(end) for end in ends] == [type(None), type(None), ArithmeticError, type(None), type(None)]
        await queue.run(Counted(4), 0)


@pytest.mark.parametrize("workers", [1, 2])
async def test_who_is_cancelled_is_in_no_step_any_more(workers: int) -> None:
    steps = Steps()
    steps.go.clear()
    async with queue_of(steps, workers) as queue:
        job = Counted(100)
        running = asyncio.create_task(queue.run(job, 0))
        await until(lambda: bool(steps.groups))
        for _ in range(3):
            running.cancel()
            await asyncio.sleep(0)
        assert not running.done() and steps.inside == 1
        steps.go.set()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert steps.inside == 0 and job.left >= 99 and queue.waiting == 0
        await queue.run(Counted(3), 0)


def test_those_of_one_shape_step_with_who_is_due_first() -> None:
    jobs = [(3.0, "a"), (1.0, "b"), (2.0, "b"), (0.5, "a"), (4.0, "b")]
    assert chosen(jobs, lambda _, there: there) == [3, 0]
    assert chosen(jobs[:3], lambda _, there: there) == [1, 2]
    assert chosen(jobs, lambda _, there: 1) == [3]
