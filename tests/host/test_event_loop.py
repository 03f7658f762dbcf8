"""A blocked event loop counts as hanging, one that computes does not; it answers questions while it turns, and its tasks last."""

from __future__ import annotations

import _thread
import asyncio
import hashlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

from helpers import lengths, waiting
from omnistage.host import watchdog
from omnistage.host.background import LastingTasks
from omnistage.host.watchdog import IDLE_S, EventLoop, Watchdog, answering

LIMIT_S = 60.0
PATIENCE_S = 0.3


@pytest.fixture(autouse=True)
def sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "QUESTION_PERIOD_S", 0.05)
    monkeypatch.setattr(watchdog, "PATIENCE_S", PATIENCE_S)


class Running:
    """A loop on a thread, watched. verdict: done with the reason when the loop was said to hang."""

    def __init__(self) -> None:
        self.verdict: Future[str] = Future()
        self.watched: EventLoop | None = None
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._live(),))
        self._thread.start()
        assert self._ready.wait(LIMIT_S)

    def do(self, callback: Callable[[], object]) -> Future[None]:
        """Have the loop call a function; done afterwards."""
        done: Future[None] = Future()

        def call() -> None:
            callback()
            done.set_result(None)

        self._loop.call_soon_threadsafe(call)
        return done

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()
        self._loop.close()

    async def _live(self) -> None:
        with (
            EventLoop() as self.watched,
            Watchdog([self.watched], lambda thread, reason: self.verdict.set_result(f"{thread.name}: {reason}")),
        ):
            self._ready.set()
            await self._end.wait()


@contextmanager
def running() -> Iterator[Running]:
    loop = Running()
    yield loop
    loop.close()


def test_a_loop_that_is_blocked_hangs():
    go = threading.Event()
    with running() as loop:
        done = loop.do(go.wait)
        assert loop.verdict.result(LIMIT_S).startswith("event loop: it has work and used no CPU")
        go.set()
        done.result(LIMIT_S)


def compute(until: Callable[[], bool]) -> None:
    while not until():
        hashlib.pbkdf2_hmac("sha256", b"step", b"", 20_000)


def test_a_loop_that_is_blocked_hangs_while_native_threads_compute():
    """The native threads are those of a model's pool: no loop waits for them."""
    ended = threading.Event()

    def compute_and_tell() -> None:
        compute(loop.verdict.done)
        ended.set()

    with running() as loop:
        _thread.start_new_thread(compute_and_tell, ())
        done = loop.do(ended.wait)
        assert "used no CPU" in loop.verdict.result(LIMIT_S)
        done.result(LIMIT_S)


def test_a_loop_that_computes_too_long_hangs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(EventLoop, "step_limit_s", 0.5)
    with running() as loop:
        loop.do(lambda: compute(loop.verdict.done)).result(LIMIT_S)
        assert "may take 0.5 s" in loop.verdict.result(LIMIT_S)


def test_a_loop_that_computes_for_some_seconds_does_not_hang():
    def compute_for_some_seconds() -> None:
        end_s = time.monotonic() + PATIENCE_S + 2 * IDLE_S
        compute(lambda: time.monotonic() > end_s)

    with running() as loop:
        loop.do(compute_for_some_seconds).result(LIMIT_S)
        assert loop.watched is not None
        while not loop.watched.steps:  # The late answer was counted, so the watchdog has looked.
            assert loop.watched.busy or loop.watched.steps
            time.sleep(0.01)
        assert not loop.verdict.done()


def test_a_loop_that_answers_is_not_looked_at(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watchdog, "PATIENCE_S", LIMIT_S)
    with running() as loop:
        assert loop.watched is not None
        before = loop.watched.answers
        while loop.watched.answers < before + 10:
            time.sleep(watchdog.QUESTION_PERIOD_S)
        assert (loop.watched.steps, loop.watched.busy) == (0, False) and not loop.verdict.done()


@asynccontextmanager
async def asking() -> AsyncIterator[socket.socket]:
    """Our end, which does not block. The answers come from the other end."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, answering(theirs.detach()):
        yield ours


async def answer(ours: socket.socket) -> bytes:
    async with asyncio.timeout(30):
        return await asyncio.get_running_loop().sock_recv(ours, 4096)


async def test_a_question_is_answered_and_so_are_many_at_once() -> None:
    async with asking() as ours:
        for questions in (b"?", b"?", b"???"):
            ours.send(questions)
            assert await answer(ours)


@lengths.long_form(unkept="A launcher that reads no answers holds up no event loop, and is answered when it reads again.")
async def test_who_reads_no_answers_holds_nobody_up() -> None:
    """The launcher was stopped, so its end takes nothing more. It gets an answer as soon as it reads again."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    with ours, answering(theirs.detach()):
        async with waiting.turning() as turns:
            answered = 0
            while answered < 1000:
                ours.send(b"?")
                before = turns()
                await waiting.until(lambda: turns() > before + 3)  # noqa: B023
                answered += 1
        assert await answer(ours)
        while True:
            try:
                ours.recv(4096)
            except BlockingIOError:
                break
        ours.send(b"?")
        assert await answer(ours)


async def test_who_is_gone_is_forgotten() -> None:
    ours, theirs = socket.socketpair()
    fd = theirs.detach()
    with answering(fd):
        ours.close()
        async with waiting.turning() as turns:
            await waiting.until(lambda: turns() > 3)
        assert not asyncio.get_running_loop().remove_reader(fd), "else the loop would turn for ever"


async def test_nobody_asks() -> None:
    with answering(-1):
        await asyncio.sleep(0)


async def fail() -> None:
    raise ValueError("why")


async def end() -> None:
    return


@pytest.mark.parametrize("work", [fail, end])
async def test_whatever_ends_one_is_told_by_its_name(work: Callable[[], Coroutine[Any, Any, None]]):
    tasks = LastingTasks()
    tasks.start("other", asyncio.Event().wait())  # type: ignore[arg-type]
    tasks.start("first", work())
    async with asyncio.timeout(10):
        assert await tasks.broken == "task first ended"
    await tasks.close()


async def test_ending_all_of_them_breaks_nothing():
    tasks = LastingTasks()
    tasks.start("one", asyncio.Event().wait())  # type: ignore[arg-type]
    tasks.start("two", asyncio.Event().wait())  # type: ignore[arg-type]
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await tasks.close()
    assert tasks.broken.cancelled()
