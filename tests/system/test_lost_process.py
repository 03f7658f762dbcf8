"""Lost processes. One that stops (SIGSTOP) keeps its connections and answers nothing: only keepalive, on both ends, finds it. What happens
when the only replica of a stage is killed is in test_escalation.py."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import grpc.aio
import pytest

from helpers.ask import GenerateCall, ask, read, read_all, refusal, request
from helpers.disturbed import disturbed, found
from helpers.fleet import Fleet, fleet
from helpers.servers import CHAIN, ServerProcess, all_free
from omnistage.v1 import omni_pb2_grpc

SLOW = {"interval_s": 0.02}
ENDLESS = {"max_tokens": 20000, "ignore_eos": True}


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One of each kind."""
    with fleet(tmp_path_factory.mktemp("logs"), replicas=1, options=SLOW) as running:
        yield running


@contextmanager
def stopped(server: ServerProcess) -> Iterator[None]:
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


async def under_way(stub: omni_pb2_grpc.OmniServiceAsyncStub) -> GenerateCall:
    """An answer that has begun and goes on for long."""
    call = stub.Generate(request("hello", 1, thinker=ENDLESS), timeout=60)
    await read(call)
    await read(call)
    return call


@pytest.mark.parametrize("kind", CHAIN)
async def test_an_answer_ends_with_a_typed_error_when_a_stage_stops(toys: Fleet, kind: str) -> None:
    """The client gets STAGE_LOST long before its deadline; the stages that go on are free; the stage that wakes takes sessions again."""
    others = [toys.address(name) for name in toys.stages if name != f"{kind}-0"]
    async with disturbed(toys) as stub:
        call = await under_way(stub)
        with stopped(toys.server(f"{kind}-0")):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                async for _ in read_all(call):
                    pass
            assert refusal(failed.value).reason == "STAGE_LOST"
            await all_free(others)
        await all_free([toys.address(name) for name in toys.stages])
        await found(toys, stub)
        answer = await ask(stub, request("hello", 2))
        answer.check_toy(2, "hello")


async def test_stages_free_the_session_of_a_router_that_stops(toys: Fleet) -> None:
    async with disturbed(toys) as stub:
        call = await under_way(stub)
        with stopped(toys.server("router")):
            await all_free([toys.address(name) for name in toys.stages])
        call.cancel()
