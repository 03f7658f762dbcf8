"""Steps of many jobs on few workers, by either order: each job steps until it is done, once at a time, and one that fails fails alone."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from helpers.waiting import until
from omnistage.models.interface import Batches, Load
from omnistage.models.steps.loop import MAX_AHEAD, Aside, Loop
from omnistage.models.steps.orders import Fair, JobWork, Listeners, TooCostly
from omnistage.models.worker import Worker

LIMIT_S = 60.0
MAX_GROUP = 4


class CountedJob:
    """A job of so many steps. Its key changes with each."""

    def __init__(self, steps: int, kind: str = "") -> None:
        self.left, self.kind, self.inside = steps, kind, threading.Lock()
        self.asked, self.given_up = steps, 0


class Countdown:
    """A step that counts down, and writes down which jobs were in it, and whether there was a second thread. fails: which of its functions
    raises the error for a bad job. waits: until `go` is set."""

    def __init__(self, fails: str = "", error: type[Exception] = ArithmeticError, *, waits: bool = False) -> None:
        self.fails, self.error = fails, error
        self.groups = list[tuple[Sequence[CountedJob], bool]]()
        self.go, self.inside, self.side_by_side = threading.Event(), 0, 0
        self._lock = threading.Lock()
        if not waits:
            self.go.set()

    def _fail(self, where: str, *jobs: CountedJob) -> None:
        if where == self.fails and any(job.kind == "bad" for job in jobs):
            raise self.error("told to fail")

    def key(self, job: CountedJob) -> Hashable | None:
        self._fail("key", job)
        return None if job.kind == "alone" else (job.kind if job.kind in ("late", "soon") else "", job.left % 2)

    def step(self, jobs: Sequence[CountedJob], aside: Aside | None) -> None:
        assert len({self.key(job) for job in jobs}) == 1 and (self.key(jobs[0]) is not None or len(jobs) == 1)
        with self._lock:
            self.groups.append((jobs, aside is not None))
            self.inside += 1
            self.side_by_side = max(self.side_by_side, self.inside)
        try:
            for job in jobs:
                assert not job.given_up, "freed under the thread"
                assert job.inside.acquire(blocking=False), "a job is in two steps at once"
            assert self.go.wait(LIMIT_S)
            self._fail("step", *jobs)
            if aside is not None:
                aside(lambda: None).result(LIMIT_S)
        finally:
            for job in jobs:
                job.inside.release()
            with self._lock:
                self.inside -= 1

    def take(self, job: CountedJob) -> int:
        self._fail("take", job)
        job.left -= 1
        return job.left

    def is_done(self, job: CountedJob) -> bool:
        self._fail("is_done", job)
        return job.left == 0

    def give_up(self, job: CountedJob) -> None:
        job.given_up += 1


@dataclass
class LoopHouse:
    """A loop with what it needs. ask: of the order, for a job that is due then."""

    steps: Countdown
    loop: Loop[CountedJob, Any, int]
    ask: Callable[[CountedJob, float], Any]

    async def run(self, job: CountedJob, due: float = 0.0) -> None:
        try:
            await self.loop.run(job, self.ask(job, due))
        finally:
            assert job.given_up == 1


@asynccontextmanager
async def house(
    order: str, workers: int, steps: Countdown | None = None, *, halved: bool = False, most: int = MAX_GROUP
) -> AsyncIterator[LoopHouse]:
    steps = steps or Countdown()
    made = [Worker(f"test {number}", 1) for number in range(workers)]
    try:
        if order == "fair":
            loop: Loop[CountedJob, Any, int] = Loop(steps, Fair[CountedJob](1000, 1000, most), made, is_eager=True)
            yield LoopHouse(steps, loop, lambda job, due: JobWork(1, job.asked, str(due)))
        else:
            listeners = Listeners[CountedJob](lambda _, there: min(there, most), lambda _: halved)
            yield LoopHouse(steps, Loop(steps, listeners, made), lambda _, due: due)
    finally:
        for worker in made:
            await worker.close()


@pytest.fixture(params=["fair", "listeners"])
def order(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("workers", [1, 2, 3])
async def test_every_job_is_stepped_to_its_end(order: str, workers: int, seed: int) -> None:
    source, halved = random.Random(seed), True
    jobs = [CountedJob(source.randint(1, 30), source.choice(["a", "b", "late", "alone"])) for _ in range(40)]
    async with house(order, workers, halved=halved) as made:

        async def come(job: CountedJob) -> None:
            for _ in range(source.randint(0, 20)):
                await asyncio.sleep(0)
            await made.run(job, source.random())
            assert job.left == 0

        await asyncio.gather(*map(come, jobs))
        asked = sum(job.asked for job in jobs)
        assert made.loop.load == Load(queued=0, batches=Batches(len(made.steps.groups), asked))
        assert sum(len(group) for group, _ in made.steps.groups) == asked and made.steps.side_by_side <= workers
        assert max(len(group) for group, _ in made.steps.groups) <= MAX_GROUP


async def test_those_who_come_at_one_moment_share_the_first_step(order: str) -> None:
    async with house(order, 1) as made:
        await asyncio.gather(*(made.run(CountedJob(2)) for _ in range(3)))
        assert [len(group) for group, _ in made.steps.groups] == [3, 3]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("error", [ArithmeticError, StopIteration])
@pytest.mark.parametrize("where", ["step", "take", "key", "is_done"])
async def test_a_job_that_fails_harms_no_other(order: str, workers: int, where: str, error: type[Exception]) -> None:
    """Put together with others it is found out, and nobody takes a step more than it needs."""
    steps = Countdown(where, error, waits=True)
    async with house(order, workers, steps) as made:
        holding = [asyncio.create_task(made.run(CountedJob(1, "first"))) for _ in range(workers)]
        await until(lambda: steps.inside == workers or sum(len(group) for group, _ in steps.groups) == workers)
        jobs = [CountedJob(3, "bad") if number == 2 else CountedJob(3, "good") for number in range(5)]
        running = [asyncio.create_task(made.run(job, 1)) for job in jobs]
        await until(lambda: len(made.loop._entries) == 5 + workers)
        steps.go.set()
        ends = await asyncio.gather(*running, return_exceptions=True)
        await asyncio.gather(*holding)
        assert ends[:2] + ends[3:] == [None] * 4
        assert isinstance(ends[2], RuntimeError if error is StopIteration else error) and "told to fail" in str(ends[2])
        assert [job.left for job in jobs] == [0, 0, 2 if where == "is_done" else 3, 0, 0]
        await made.run(CountedJob(4))
        assert len(made.loop._idle) == workers


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_job_that_is_cancelled_is_in_no_step_any_more(order: str, workers: int) -> None:
    steps = Countdown(waits=True)
    async with house(order, workers, steps) as made:
        job = CountedJob(100)
        running = asyncio.create_task(made.run(job))
        await until(lambda: bool(steps.groups))
        for _ in range(3):
            running.cancel()
            await asyncio.sleep(0)
        assert not running.done() and steps.inside == 1 and not job.given_up
        steps.go.set()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert steps.inside == 0 and job.left >= 100 - MAX_AHEAD and made.loop.load.queued == 0
        await made.run(CountedJob(3))


async def test_a_job_that_may_not_go_on_holds_only_itself_up(order: str) -> None:
    async with house(order, 1) as made:
        held, shown = CountedJob(20), list[int]()

        def show(left: int) -> bool:
            shown.append(left)
            return left != 15

        over = made.loop.submit(held, made.ask(held, 0), show)
        await until(lambda: 15 in shown)
        await asyncio.gather(*(made.run(CountedJob(9)) for _ in range(3)))
        assert held.left in range(15 - MAX_AHEAD - 1, 16) and not over.done(), "at most the steps that the worker was ahead"
        while not over.done():
            made.loop.go_on(held)
            await asyncio.sleep(0.001)
        await made.loop.withdraw(held)
        assert shown == [*reversed(range(20))] and held.given_up == 1


async def test_what_never_fits_is_refused_and_leaves_nothing() -> None:
    async with house("fair", 1) as made:
        with pytest.raises(TooCostly):
            made.loop.submit(CountedJob(1), JobWork(1001, 1))
        assert not made.loop._entries and made.loop.load.queued == 0


@pytest.mark.parametrize("function", ["choose", "stepped", "is_halved"])
async def test_an_error_of_no_job_ends_all_and_lets_none_wait_for_ever(order: str, function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is to blame: the order itself fails once."""

    def failing(*asked: Any) -> None:
        monkeypatch.undo()
        raise AssertionError("told to fail")

    async with house(order, 2, most=3) as made, asyncio.timeout(LIMIT_S):
        monkeypatch.setattr(made.loop._order, function, failing)
        jobs = [CountedJob(3) for _ in range(1 if function == "is_halved" else 3)]
        ends = await asyncio.gather(*map(made.run, jobs), return_exceptions=True)
        assert {type(end) for end in ends} == {RuntimeError} and "told to fail" in str(ends[0])
        await made.run(CountedJob(2))
        assert len(made.loop._idle) == 2


async def test_jobs_are_spread_before_they_are_put_together(order: str) -> None:
    """Over workers that have nothing to do."""
    async with house(order, 2, Countdown(waits=True)) as made:
        running = [asyncio.create_task(made.run(CountedJob(1))) for _ in range(6)]
        await until(lambda: made.steps.inside == 2)
        assert [len(group) for group, _ in made.steps.groups] == [3, 3]
        made.steps.go.set()
        await asyncio.gather(*running)


async def test_a_job_that_is_alone_has_a_second_thread_where_that_is_worth_it() -> None:
    for halved in (True, False):
        async with house("listeners", 2, halved=halved) as made:
            await made.run(CountedJob(5))
            assert [aside for _, aside in made.steps.groups] == [halved] * 5


async def test_a_second_thread_is_for_the_next_job_first() -> None:
    async with house("listeners", 2, Countdown(waits=True), halved=True, most=1) as made:
        running = [asyncio.create_task(made.run(CountedJob(1))) for _ in range(2)]
        await until(lambda: made.steps.inside == 2)
        assert not any(aside for _, aside in made.steps.groups)
        made.steps.go.set()
        await asyncio.gather(*running)


async def test_what_is_due_first_steps_first_with_others_of_its_key() -> None:
    steps = Countdown(waits=True)
    async with house("listeners", 1, steps) as made:
        running = [asyncio.create_task(made.run(CountedJob(1)))]
        await until(lambda: bool(steps.groups))
        jobs = [(CountedJob(1, "late"), 9.0), (CountedJob(1, "soon"), 1.0), (CountedJob(1, "late"), 2.0), (CountedJob(1, "soon"), 10.0)]
        running += [asyncio.create_task(made.run(job, due)) for job, due in jobs]
        await until(lambda: made.loop.load.queued == 5)
        steps.go.set()
        await asyncio.gather(*running)
    assert [[job.kind for job in group] for group, _ in steps.groups] == [[""], ["soon", "soon"], ["late", "late"]]
    assert [group[0] for group, _ in steps.groups[1:]] == [jobs[1][0], jobs[2][0]]
