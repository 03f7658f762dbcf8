"""A router that is killed: its clients ask another one for the rest of the answer, and nothing is missing or there twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import grpc
import grpc.aio
import pytest

from helpers import lengths
from helpers.ask import WholeAnswer, ask, request
from helpers.disturbed import MOMENTS, SLOW, SLOWER_SOUND, audio_chunks, continued, disturbed, joined
from helpers.fleet import Fleet, fleet
from omnistage.v1 import omni_pb2, omni_pb2_grpc

TOKENS = 150
LONG = {"max_tokens": TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One of each; every tensor is a reference into shared memory."""
    folder, arguments = tmp_path_factory.mktemp("logs"), ["--inline-limit", "0"]
    with fleet(folder, replicas=1, options=SLOW, options_of=SLOWER_SOUND, stage_args=arguments) as running:
        yield running


async def cut_off(
    running: Fleet, stub: omni_pb2_grpc.OmniServiceAsyncStub, asked: omni_pb2.GenerateRequest, when: Callable[[WholeAnswer], bool]
) -> WholeAnswer:
    """The answer whose router was killed at this point; the router is back."""
    answer = WholeAnswer()
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        async for event in stub.Generate(asked, timeout=60, wait_for_ready=True):
            answer.take(event)
            if when(answer) and running.server("router").alive:
                running.kill("router")
    assert failed.value.code() == grpc.StatusCode.UNAVAILABLE
    running.begin("router")
    await asyncio.to_thread(running.ready, "router")
    return answer


@lengths.drawn_cells(1, "moment", MOMENTS)
async def test_the_rest_of_an_answer_comes_from_the_next_router(toys: Fleet, moment: str, seed: int) -> None:
    async with disturbed(toys) as stub:
        asked = request("hello", seed, thinker=LONG, request_id="asked-twice")
        begin = await cut_off(toys, stub, asked, MOMENTS[moment])
        rest = await ask(stub, continued(asked, begin))
        joined(begin, rest).check_toy(seed, "hello", TOKENS)
        assert rest.started is not None and begin.started is not None
        assert list(rest.started.revisions) == list(begin.started.revisions) == ["1", "1", "1"]


async def test_a_router_is_killed_and_then_the_next_one(toys: Fleet, seed: int) -> None:
    async with disturbed(toys) as stub:
        asked = request("hello", seed, thinker=LONG)
        begin = await cut_off(toys, stub, asked, audio_chunks(10))
        more = await cut_off(toys, stub, continued(asked, begin), audio_chunks(10))
        both = joined(begin, more)
        rest = await ask(stub, continued(asked, both))
        joined(both, rest).check_toy(seed, "hello", TOKENS)
