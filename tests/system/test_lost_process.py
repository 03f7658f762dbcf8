"""Lost processes. One that stops (SIGSTOP) keeps its connections and answers nothing. The loss of a stage's only replica is in
test_escalation.py, and the loss of one with another beside it in test_frozen.py."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import grpc.aio
import pytest

from helpers import lengths
from helpers.ask import GenerateCall, WholeAnswer, ask, read, refusal, request
from helpers.disturbed import DisturbanceStep, ask_through, disturbed, found, text_chunks
from helpers.fleet import Fleet, fleet
from helpers.servers import CHAIN, LOOK_S, ServerProcess, all_free
from omnistage.v1 import omni_pb2, omni_pb2_grpc

SLOW = {"interval_s": 0.02}
ENDLESS = {"max_tokens": 20000, "ignore_eos": True}
TOKENS = 100
LONG = {"max_tokens": TOKENS, "ignore_eos": True}


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


async def told_lost(stub: omni_pb2_grpc.OmniServiceAsyncStub, address: str) -> None:
    """Return when the router says of a replica that it is lost; it has no stream of changes."""
    async with asyncio.timeout(30):
        while True:
            listed = await stub.ListReplicas(omni_pb2.ListReplicasRequest(), timeout=5)
            if {replica.state for replica in listed.replicas if replica.address == address} == {omni_pb2.REPLICA_STATE_LOST}:
                return
            await asyncio.sleep(LOOK_S)


@lengths.one_or_all("kind", CHAIN)
async def test_the_only_replica_is_waited_for_while_it_is_stopped(toys: Fleet, kind: str, seed: int) -> None:
    """In the middle of an answer, and by one that is asked meanwhile. The router has found long before that it gives no sign of life."""
    name = f"{lengths.draw(kind, CHAIN, seed)}-0"
    async with disturbed(toys) as stub:
        asked: list[asyncio.Task[WholeAnswer]] = []

        async def doze() -> None:
            with stopped(toys.server(name)):
                await told_lost(stub, toys.address(name))
                asked.append(asyncio.create_task(ask(stub, request("meanwhile", seed), timeout_s=60)))

        answer = await ask_through(stub, request("hello", seed, thinker=LONG), DisturbanceStep(text_chunks(10), doze))
        answer.check_toy(seed, "hello", TOKENS)
        assert toys.address(name) not in [failover.lost for failover in answer.failovers]
        (await asked[0]).check_toy(seed, "meanwhile")
        await all_free([toys.address(name) for name in toys.stages])
        await found(toys, stub)


@lengths.one_or_all("kind", CHAIN)
async def test_who_was_waited_for_is_said_at_the_end(toys: Fleet, kind: str, seed: int) -> None:
    """The only replica does not wake within the time of the request. The stages that go on are free; the one that wakes takes sessions
    again."""
    kind = lengths.draw(kind, CHAIN, seed)
    others = [toys.address(name) for name in toys.stages if name != f"{kind}-0"]
    async with disturbed(toys) as stub:
        with stopped(toys.server(f"{kind}-0")):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await ask(stub, request("hello", seed), timeout_s=4)
            told = refusal(failed.value)
            assert (told.reason, told.metadata) == ("DEADLINE", {"stage": kind}) and f"{kind} " in told.message, told
            assert "no sign of life" in told.message
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
