"""Drawings on a thread that goes on by itself: as many as there are share its steps, and who comes or goes does so within a step or two."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable, Generator, Hashable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import pytest

from helpers.waiting import until
from omnistage.models.interface import Drawn, EncodedPicture, Preview, StepsDone
from omnistage.models.steps import session
from omnistage.models.steps.loop import MAX_AHEAD, Aside
from omnistage.models.steps.session import MAX_UNREAD, Sessions
from omnistage.models.worker import Worker

T = TypeVar("T")

LIMIT_S = 30.0


@dataclass(eq=False)
class SumJob:
    """Adds its step to its value until it has taken all. gate: which step waits for the test. share, pieces: of its decoder."""

    steps: int
    shows: bool = False
    fails_at: int = -1
    gate: int = -1
    share: float = 0.0
    pieces: int = 1
    breaks_at: int = -1

    def __post_init__(self) -> None:
        self.step, self.value, self.given_up = 0, 0, False
        self.at_gate, self.go_on = threading.Event(), threading.Event()


class Adder:
    """Implements Drawing. groups: jobs of each step, in order. held: shares of the decoders that hold memory now."""

    def __init__(self) -> None:
        self.held = 0.0
        self.groups: list[tuple[SumJob, ...]] = []
        self.threads: set[int] = set()

    def cost(self, job: SumJob) -> int:
        return 1

    def steps(self, job: SumJob) -> int:
        return job.steps

    def key(self, job: SumJob) -> Hashable:
        return "all"

    def step(self, jobs: Sequence[SumJob], aside: Aside | None) -> None:
        self.groups.append(tuple(jobs))
        self.threads.add(threading.get_ident())
        for job in jobs:
            assert not job.given_up, "freed under the thread"
            if job.step == job.gate:
                job.at_gate.set()
                assert job.go_on.wait(LIMIT_S)
            if job.step == job.fails_at:
                raise ValueError(f"step {job.step}")

    def take(self, job: SumJob) -> Sequence[Drawn]:
        job.step += 1
        job.value += job.step
        if job.shows:
            return [Preview(b"", "image/png", job.step)]
        return [StepsDone(job.step, job.steps)]

    def is_done(self, job: SumJob) -> bool:
        return job.step == job.steps

    def decoder_share(self, job: SumJob) -> float:
        return job.share

    def decode(self, job: SumJob) -> Generator[Drawn, None, None]:
        self.held += job.share
        try:
            assert self.held <= 1 or self.held == job.share, "decoders hold more than there is"
            for piece in range(job.pieces):
                if piece == job.breaks_at:
                    raise ValueError(f"piece {piece}")
                yield EncodedPicture(str(job.value).encode(), "image/png")
        finally:
            self.held -= job.share

    def give_up(self, job: SumJob) -> None:
        job.given_up = True


class CountingWorker(Worker):
    """units: of work that the thread was given."""

    units = 0

    async def run(self, call: Callable[[], T], urgent: bool = False) -> T:
        self.units += 1
        return await super().run(call, urgent)


class SessionHouse:
    """Sessions on a thread."""

    def __init__(self) -> None:
        self.worker, self.adder = CountingWorker("adder", 1), Adder()
        self.sessions = Sessions[SumJob](self.adder, [self.worker], budget=100, step_budget=100, is_eager=True)

    async def drawn(self, job: SumJob) -> list[Drawn]:
        async with aclosing(self.sessions.draw(job)) as pieces:
            return [piece async for piece in pieces]

    async def check_drawn(self, *steps: int) -> None:
        """Jobs of so many steps, all at once, are drawn to their ends."""
        found = await asyncio.gather(*(self.drawn(SumJob(count)) for count in steps))
        assert [pieces[-1] for pieces in found] == [EncodedPicture(picture_of(count), "image/png") for count in steps]


@asynccontextmanager
async def house() -> AsyncIterator[SessionHouse]:
    made = SessionHouse()
    try:
        yield made
    finally:
        await made.worker.close()
        assert made.sessions.running == made.sessions.load.queued == 0


async def at_gate(job: SumJob) -> None:
    assert await asyncio.to_thread(job.at_gate.wait, LIMIT_S)


def picture_of(steps: int) -> bytes:
    return str(steps * (steps + 1) // 2).encode()


async def test_who_is_alone_is_drawn_without_waiting_for_the_event_loop_after_each_step() -> None:
    async with house() as made:
        pieces = await made.drawn(SumJob(500))
        assert pieces[-1] == EncodedPicture(picture_of(500), "image/png") and StepsDone(500, 500) in pieces
        assert made.worker.units <= 500 // MAX_AHEAD + 3, "the steps, the picture, and its end"
        assert made.sessions.steps == 500 + 2 and made.adder.threads == {made.worker._thread.ident}


async def test_who_comes_meanwhile_shares_the_next_step_but_one() -> None:
    first, second = SumJob(50, gate=10), SumJob(10)
    async with house() as made, asyncio.TaskGroup() as group:
        one = group.create_task(made.drawn(first))
        await at_gate(first)
        other = group.create_task(made.drawn(second))
        await until(lambda: made.sessions.load.queued)
        first.go_on.set()
        assert (await other)[-1] == EncodedPicture(picture_of(10), "image/png")
        assert (await one)[-1] == EncodedPicture(picture_of(50), "image/png")
        groups = [len(jobs) for jobs in made.adder.groups]
        assert groups.index(2) in (11, 12) and groups.count(2) == 10 and len(groups) == 50


async def test_nothing_is_done_for_whoever_goes_away() -> None:
    job = SumJob(1000, gate=10)
    async with house() as made:
        pieces = made.sessions.draw(job)
        await anext(pieces)
        await at_gate(job)
        closing = asyncio.create_task(pieces.aclose())
        await asyncio.sleep(0)
        assert not closing.done() and not job.given_up, "the thread has it"
        job.go_on.set()
        await closing
        assert job.given_up and job.step in (11, 12)
        await made.check_drawn(3)


async def test_one_that_ends_leaves_the_others_their_steps() -> None:
    async with house() as made:
        await made.check_drawn(3, 30, 200)
        assert len(made.adder.groups) == 200 and made.worker.units < 100


async def test_the_thread_waits_for_a_reader_that_does_not_read() -> None:
    job = SumJob(100, shows=True)
    async with house() as made:
        async with aclosing(made.sessions.draw(job)) as pieces:
            first = await anext(pieces)
            await until(lambda: not made.sessions._loop._stepping)
            behind = job.step
            assert MAX_UNREAD <= behind <= MAX_UNREAD + MAX_AHEAD + 2
            shown = [first, *[piece async for piece in pieces]]
        assert [piece.step for piece in shown if isinstance(piece, Preview)] == [*range(1, 101)]


async def test_what_is_shown_is_never_far_ahead_of_a_slow_reader() -> None:
    """Each piece that it reads makes room for one."""
    job, ahead = SumJob(200, shows=True), list[int]()
    async with house() as made, aclosing(made.sessions.draw(job)) as pieces:
        async for piece in pieces:
            if isinstance(piece, Preview):
                await asyncio.sleep(0.002)
                ahead.append(job.step - piece.step)
        assert len(ahead) == 200 and max(ahead) <= MAX_UNREAD + MAX_AHEAD + 2


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0, 3.0])
async def test_decoders_hold_no_more_than_there_is_and_slow_readers_hold_none(seed: int, share: float) -> None:
    """Some readers stop after a piece, some leave, some come late. All that is read is whole."""
    source = random.Random(seed)
    async with house() as made:
        go_on = asyncio.Event()

        async def read(job: SumJob, reading: str) -> int:
            count = 0
            async with aclosing(made.sessions.draw(job)) as pieces:
                async for piece in pieces:
                    count += isinstance(piece, EncodedPicture)
                    if count == 1 and reading == "stops":
                        await go_on.wait()
                    if count == 1 and reading == "leaves":
                        break
            return count

        kinds = ["reads", "stops", "leaves"] * 6
        source.shuffle(kinds)
        tasks = [(kind, asyncio.create_task(read(SumJob(source.randrange(1, 9), share=share, pieces=40), kind))) for kind in kinds]
        async with asyncio.timeout(LIMIT_S):
            assert {await task for kind, task in tasks if kind == "reads"} == {40}
            await until(lambda: not made.sessions._decoding)
            go_on.set()
            assert {await task for kind, task in tasks if kind == "stops"} == {40}
            assert {await task for kind, task in tasks if kind == "leaves"} == {1}
        assert made.adder.held == 0 and not made.sessions._waiting_to_decode


async def test_pieces_that_nobody_reads_have_a_bound_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MAX_UNREAD_BYTES", 100)
    async with house() as made, aclosing(made.sessions.draw(SumJob(9, share=1.0, pieces=500))) as pieces:
        count = int(isinstance(await anext(pieces), EncodedPicture))
        await until(lambda: any(reader.unread_bytes >= 100 for reader in made.sessions._decoding) and not made.sessions._loop._stepping)
        (reader,) = made.sessions._decoding
        assert 100 <= reader.unread_bytes <= 100 + 2 * (MAX_AHEAD + 2)
        async for piece in pieces:
            count += isinstance(piece, EncodedPicture)
        assert count == 500


async def test_a_decoder_that_fails_holds_nothing_though_its_reader_has_not_read_the_error() -> None:
    async with house() as made, aclosing(made.sessions.draw(SumJob(2, share=1.0, pieces=9, breaks_at=3))) as pieces:
        for _ in range(2):
            await anext(pieces)
            async with asyncio.timeout(LIMIT_S):
                other = await made.drawn(SumJob(2, share=1.0, pieces=9))
            assert [type(piece) for piece in other].count(EncodedPicture) == 9
        with pytest.raises(ValueError, match="piece 3"):
            async for _ in pieces:
                pass


async def test_an_error_in_the_middle_ends_the_one_that_it_is_of() -> None:
    """After what it had shown before."""
    bad, good = SumJob(100, shows=True, fails_at=4), SumJob(40)
    async with house() as made:
        shown = list[Drawn]()

        async def read() -> None:
            async with aclosing(made.sessions.draw(bad)) as pieces:
                async for piece in pieces:
                    shown.append(piece)

        found = await asyncio.gather(read(), made.drawn(good), return_exceptions=True)
        assert isinstance(found[0], ValueError) and [piece.step for piece in shown if isinstance(piece, Preview)] == [1, 2, 3, 4]
        assert not isinstance(found[1], BaseException) and found[1][-1] == EncodedPicture(picture_of(40), "image/png")


@pytest.mark.parametrize("count", [1, 2, 5, 33])
async def test_many_that_come_and_go_are_all_drawn(count: int) -> None:
    async with house() as made:
        for _ in range(3):
            await made.check_drawn(*(1 + number % 7 for number in range(count)))
