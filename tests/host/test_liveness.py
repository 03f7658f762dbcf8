"""Questions whether an event loop turns are answered while it turns."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from helpers import lengths, waiting
from omnistage.host.watchdog import answering


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
