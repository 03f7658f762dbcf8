"""Several event loops in one process: gRPC has one poller for all of them, so what one loop leaves behind would be an error on another."""

from __future__ import annotations

import asyncio
import random
import threading
from contextlib import suppress
from typing import Any

import pytest

from helpers import lengths
from omnistage.client import AsyncOmni, UnavailableError
from omnistage.client.threads import is_of_another_loop

LOOPS, ROUNDS = 3, 25


async def leave_a_stream(omni: AsyncOmni, chance: random.Random) -> None:
    """Break off in the middle; the generator is left to the garbage collector."""
    async for _ in omni.stream("hello " * 20):
        break


async def cancel_an_answer(omni: AsyncOmni, chance: random.Random) -> None:
    answering = asyncio.create_task(omni.generate("hello " * 50))
    await asyncio.sleep(chance.random() * 0.05)
    answering.cancel()
    with suppress(asyncio.CancelledError):
        await answering


async def close_one_of_two(omni: AsyncOmni, chance: random.Random) -> None:
    one, other = omni.stream("hello " * 20), omni.stream("hello " * 30)
    await anext(one)
    await anext(other)
    await one.aclose()


@lengths.drawn_cells(1, "leave", [leave_a_stream, cancel_an_answer, close_one_of_two])
def test_a_loop_that_ends_leaves_nothing_to_others(leave: Any, toy_address: str, seed: int) -> None:
    complaints: list[dict[str, Any]] = []

    async def use(chance: random.Random) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))
        async with AsyncOmni(address=toy_address) as omni:
            await leave(omni, chance)

    in_loops(use, seed)
    assert complaints == []


def test_a_loop_that_ends_while_it_connects_leaves_nothing_to_others(free_port: int, seed: int) -> None:
    complaints: list[dict[str, Any]] = []

    async def use(chance: random.Random) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))
        omni = AsyncOmni(address=f"127.0.0.1:{free_port}", connect_timeout_s=0.01 + chance.random() * 0.2)
        with pytest.raises(UnavailableError):
            await omni.generate("hello")
        await omni.close()

    in_loops(use, seed)
    assert complaints == []


def in_loops(use: Any, seed: int) -> None:
    """Run it again and again in event loops of several threads."""

    def work(number: int) -> None:
        for turn in range(ROUNDS):
            asyncio.run(use(random.Random(f"{seed} {number} {turn}")))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(LOOPS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_what_is_about_another_loop_is_told_from_what_is_not() -> None:
    message = "Exception in callback PollerCompletionQueue._handle_events(...)"
    assert is_of_another_loop({"message": message, "exception": RuntimeError("Event loop is closed")})
    assert is_of_another_loop({"message": message, "exception": BlockingIOError()})
    assert not is_of_another_loop({"message": message, "exception": RuntimeError("a bug")})
    assert not is_of_another_loop({"message": "Exception in callback work()", "exception": RuntimeError("Event loop is closed")})
