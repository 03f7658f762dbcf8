"""The door of a router with so many places: its clock and its events. The policy has tests of its own."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack

import pytest

from omnistage.host.places import Client
from omnistage.router.admission import STALLED_S, Admission, Place
from omnistage.wire.errors import StageError


def house(limit: int, share: float = 1.0) -> Admission:
    return Admission(lambda: limit, share)


async def test_who_finds_it_full_is_told_at_once():
    admission = house(2)
    async with AsyncExitStack() as places:
        for _ in range(2):
            await places.enter_async_context(admission.place(Client("me")))
        assert admission.running == 2
        for _ in range(3):
            with pytest.raises(StageError, match="OVERLOADED") as raised:
                await places.enter_async_context(admission.place(Client("me")))
            assert raised.value.retry_delay_s
        assert admission.running == 2
    assert admission.running == 0


async def test_a_place_is_free_again_whatever_happened_in_it():
    admission = house(1)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            async with admission.place(Client("me")):
                raise ZeroDivisionError
    async with admission.place(Client("me")):
        assert admission.running == 1


async def test_draining_refuses_and_waits_for_who_is_in():
    admission = house(5)
    async with asyncio.timeout(5):
        await admission.idle()
        async with admission.place(Client("me")):
            admission.drain()
            with pytest.raises(StageError, match="DRAINING"):
                async with admission.place(Client("me")):
                    pass
            idle = asyncio.create_task(admission.idle())
            await asyncio.sleep(0)
            assert not idle.done()
        await idle


async def inside(admission: Admission, client: str, entered: asyncio.Event | None = None) -> Place:
    async with admission.place(Client(client)) as place:
        if entered is not None:
            entered.set()
        return place


async def waits(admission: Admission, client: str) -> asyncio.Task[Place]:
    """Another client that has come to wait."""
    before = admission.waiting
    task = asyncio.create_task(inside(admission, client))
    await asyncio.sleep(0)  # Its first step is to ask.
    assert admission.waiting == before + 1
    return task


async def test_another_client_waits_for_the_next_place():
    admission = house(1)
    async with asyncio.timeout(10):
        async with admission.place(Client("me")):
            other = await waits(admission, "other")
            assert admission.running == 1
        place = await other
    assert place.queued_s > 0 and admission.running == 0 and admission.waiting == 0


async def test_who_waits_too_long_or_while_the_house_closes_is_told():
    admission = house(1)
    async with asyncio.timeout(30), admission.place(Client("me")):
        with pytest.raises(StageError, match="OVERLOADED") as raised:
            await (await waits(admission, "other"))
        assert raised.value.retry_delay_s
        other = await waits(admission, "other")
        admission.drain()
        with pytest.raises(StageError, match="DRAINING"):
            await other
        assert admission.waiting == 0


async def test_who_goes_away_while_waiting_leaves_nothing():
    admission = house(1)
    async with asyncio.timeout(10):
        async with admission.place(Client("me")):
            other = await waits(admission, "other")
            other.cancel()
            await asyncio.wait({other})
            assert admission.waiting == 0
            given = await waits(admission, "third")
        # The place is given and its waiter cancelled before it could look.
        given.cancel()
        await asyncio.wait({given})
    assert admission.running == 0


async def test_a_client_that_stalls_loses_its_place_to_one_that_waits_and_keeps_it_else():
    admission = house(2)
    async with asyncio.timeout(30), AsyncExitStack() as places:
        stalling, reading = [await places.enter_async_context(admission.place(Client("me"))) for _ in range(2)]
        stalling.writing_since = time.monotonic() - STALLED_S
        await asyncio.sleep(0)
        assert not stalling.taken_back.done(), "nobody waits"
        other = await waits(admission, "other")
        await stalling.taken_back
        assert not reading.taken_back.done()
        other.cancel()
        await asyncio.wait({other})


async def test_the_limit_is_asked_anew():
    limit = 1
    admission = Admission(lambda: limit, 1.0)
    async with admission.place(Client("me")):
        limit = 2
        async with admission.place(Client("me")):
            assert admission.running == 2
