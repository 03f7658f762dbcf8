"""Any messages in a conversation, changed at random and in any order: turns are answered or fail, and calls end, typed."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import grpc
import grpc.aio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import lengths
from helpers.ask import refusal, request
from helpers.mistreated import TYPED, Mistreated, mistreated
from helpers.mutation import changed
from helpers.servers import CLIENT_OPTIONS
from omnistage.v1 import chunk_pb2, omni_pb2, omni_pb2_grpc, stage_pb2

CONVERSE = "/omnistage.v1.OmniService/Converse"
WORDS = ["text", "audio", "media0", "toy", "user", "video/mp4", "1"]
MEDIA = chunk_pb2.Chunk(port="media0", count=3, media=chunk_pb2.MediaChunk(data=b"abc"))
PART = stage_pb2.Part(port="media0", media_type="video/mp4")
GOOD = [
    omni_pb2.ConverseRequest(turn=request()),
    omni_pb2.ConverseRequest(turn=request(outputs=["text"])),
    omni_pb2.ConverseRequest(turn=request(thinker={"messages": [stage_pb2.Message(role="user", parts=[PART])]})),
    omni_pb2.ConverseRequest(chunk=MEDIA),
    omni_pb2.ConverseRequest(interrupt=stage_pb2.Interrupt()),
    omni_pb2.ConverseRequest(credit=stage_pb2.Credit(port="text", total=3)),
]

Messages = st.lists(
    st.one_of(
        st.sampled_from(GOOD).map(lambda good: good.SerializeToString()),
        st.sampled_from(GOOD).flatmap(lambda good: changed(good, WORDS)).map(lambda bad: bad.SerializeToString()),
        st.binary(max_size=20),
    ),
    min_size=1,
    max_size=4,
)


@pytest.fixture(scope="module")
def house() -> Iterator[Mistreated]:
    with mistreated() as opened:
        yield opened


async def heard(address: str, messages: list[bytes]) -> list[str]:
    """The results of the turns, and the end of the call: reasons, or OK for an answer and for a good end."""
    async with grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS) as channel:
        multi: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(CONVERSE)
        call = multi(timeout=60)
        reading = asyncio.create_task(_read(call))
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.InternalError):
            for message in messages:
                await call.write(message)
            await call.done_writing()
        reasons = await reading
        code = await call.code()
        if code is grpc.StatusCode.OK:
            return [*reasons, "end"]
        error = grpc.aio.AioRpcError(code, await call.initial_metadata(), await call.trailing_metadata(), await call.details())
        told = refusal(error)
        assert told.reason in TYPED, told
        return [*reasons, told.reason]


async def _read(call: grpc.aio.StreamStreamCall[bytes, bytes]) -> list[str]:
    reasons = []
    with suppress(grpc.aio.AioRpcError):
        while (data := await call.read()) is not grpc.aio.EOF:
            assert isinstance(data, bytes)
            response = omni_pb2.ConverseResponse.FromString(data)
            if response.HasField("usage"):
                reasons.append("OK")
            if response.HasField("turn_failed"):
                assert response.turn_failed.reason in TYPED, response
                reasons.append(response.turn_failed.reason)
    return reasons


@lengths.rounds(150, 2000)
def test_any_messages(house: Mistreated, rounds: int) -> None:
    reasons: Counter[str] = Counter()

    @settings(max_examples=rounds, suppress_health_check=list(HealthCheck), database=None, deadline=None)
    @given(messages=Messages)
    def play(messages: list[bytes]) -> None:
        reasons.update(house.play(heard(house.router, messages)))

    play()
    house.play(house.still_well())
    print(dict(reasons))
    assert reasons["OK"] and reasons["BAD_REQUEST"] and reasons["PROTOCOL"]


def test_clients_that_vanish_at_any_moment(house: Mistreated, seed: int) -> None:
    """The connection itself is gone, not only the call."""
    chance = random.Random(seed)

    async def vanish(messages: list[omni_pb2.ConverseRequest]) -> None:
        channel = grpc.aio.insecure_channel(house.router, options=CLIENT_OPTIONS)
        try:
            call = omni_pb2_grpc.OmniServiceStub(channel).Converse(timeout=60)
            for message in messages:
                await call.write(message)
                await call.read()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass
        finally:
            await channel.close()

    async def all_of_them() -> None:
        async with asyncio.TaskGroup() as clients:
            for _ in range(30):
                clients.create_task(vanish([GOOD[0], *chance.choices(GOOD, k=chance.randint(0, 3))]))

    house.play(all_of_them())
    house.play(house.still_well())
