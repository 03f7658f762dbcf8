"""Complete answers are counted as such at the router, however the client reads them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from helpers import lengths
from helpers.peer import TEXT, PlayingPeer, answer, event, listening
from helpers.servers import Local, local_chain, local_router
from omnistage.client import AsyncOmni, Done, Omni, ProtocolError
from omnistage.v1 import omni_pb2

ANSWERS = 100


@pytest.fixture
async def router() -> AsyncIterator[Local]:
    async with local_chain({"length": 3}) as chain, local_router({kind: stage.address for kind, stage in chain.items()}) as running:
        yield running


def ended(router: Local) -> dict[str, float]:
    """Requests of the toy pipeline by how they ended."""
    samples = [sample for family in router.registry.collect() for sample in family.samples]
    return {sample.labels["reason"]: sample.value for sample in samples if sample.name == "omnistage_router_requests_total"}


async def test_whole_answers_of_asyncio(router: Local) -> None:
    async with AsyncOmni(address=router.address) as omni:
        for number in range(ANSWERS):
            await omni.say("Hi.", seed=number)
    assert ended(router) == {"OK": ANSWERS}


@lengths.long_form("client/test_account.py::test_whole_answers_and_streams_without_asyncio")
async def test_streams_that_are_left_at_done(router: Local) -> None:
    async with AsyncOmni(address=router.address) as omni:
        for number in range(ANSWERS):
            async with aclosing(omni.stream_say("Hi.", seed=number)) as events:
                async for told in events:
                    if isinstance(told, Done):
                        break
    assert ended(router) == {"OK": ANSWERS}


async def test_whole_answers_and_streams_without_asyncio(router: Local) -> None:
    def ask() -> None:
        with Omni(address=router.address) as omni:
            for number in range(ANSWERS // 2):
                omni.say("Hi.", seed=number)
                stream = omni.stream_say("Hi.", seed=number)
                while not isinstance(next(stream), Done):
                    pass
                stream.close()

    await asyncio.to_thread(ask)
    assert ended(router) == {"OK": ANSWERS}


async def test_a_status_that_does_not_come_is_not_waited_for() -> None:
    whole = list(answer(omni_pb2.GenerateRequest()))
    peer = PlayingPeer(whole)  # it sends these and then nothing more, no status either
    async with listening(peer) as wire, AsyncOmni(address=wire.address) as omni:
        assert (await omni.generate("Hi")).text == TEXT
        async with asyncio.timeout(30):
            await peer.cancelled.wait()


async def test_what_comes_after_the_account_is_an_error() -> None:
    whole = list(answer(omni_pb2.GenerateRequest()))
    async with listening(PlayingPeer([*whole, event(omni_pb2.Usage())])) as wire, AsyncOmni(address=wire.address) as omni:
        with pytest.raises(ProtocolError, match="after its account"):
            await omni.generate("Hi")
