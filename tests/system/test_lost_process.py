"""Lost processes. One that stops (SIGSTOP) keeps its connections and answers nothing: only keepalive, on both ends, finds it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from helpers.ask import GenerateCall, ask, read, read_all, refusal, request
from helpers.servers import CHAIN, ServerProcess, all_free, omni_stub, stack
from omnistage.v1 import omni_pb2, omni_pb2_grpc

SLOW = {"interval_s": 0.02}
ENDLESS = {"max_tokens": 20000, "ignore_eos": True}


@contextmanager
def stopped(server: ServerProcess) -> Iterator[None]:
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


async def all_serving(stub: omni_pb2_grpc.OmniServiceAsyncStub) -> None:
    """Return when the router has found every stage again, which takes it at most a second or so."""
    async with asyncio.timeout(20):
        while True:
            found = await stub.ListReplicas(omni_pb2.ListReplicasRequest(), timeout=5)
            if all(replica.state == omni_pb2.REPLICA_STATE_SERVING for replica in found.replicas):
                return
            await asyncio.sleep(0.05)


@asynccontextmanager
async def under_way(address: str) -> AsyncIterator[tuple[omni_pb2_grpc.OmniServiceAsyncStub, GenerateCall]]:
    """A router's stub, and an answer of it that has begun and goes on for long."""
    async with omni_stub(address) as stub:
        call = stub.Generate(request("hello", 1, thinker=ENDLESS), timeout=60)
        await read(call)
        await read(call)
        yield stub, call


@pytest.mark.parametrize("kind", CHAIN)
async def test_an_answer_ends_with_a_typed_error_when_a_stage_stops(tmp_path: Path, kind: str) -> None:
    """The client gets STAGE_LOST long before its deadline; the stages that go on are free; the stage that wakes takes sessions again."""
    with stack(tmp_path, options=SLOW) as running:
        others = [address for name, address in running.addresses.items() if name != kind]
        async with under_way(running.address) as (stub, call):
            with stopped(running.stages[kind]):
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    async for _ in read_all(call):
                        pass
                assert refusal(failed.value).reason == "STAGE_LOST"
                await all_free(others)
            await all_free(list(running.addresses.values()))
            await all_serving(stub)
            answer = await ask(stub, request("hello", 2))
            answer.check_toy(2, "hello")


async def test_stages_free_the_session_of_a_router_that_stops(tmp_path: Path) -> None:
    with stack(tmp_path, options=SLOW) as running:
        assert running.router is not None
        async with under_way(running.address) as (_, call):
            with stopped(running.router):
                await all_free(list(running.addresses.values()))
            call.cancel()


@pytest.mark.parametrize("kind", CHAIN)
async def test_an_answer_ends_with_a_typed_retryable_error_when_a_stage_is_killed(tmp_path: Path, kind: str) -> None:
    """SIGKILL in the middle of an answer, without a second replica: STAGE_LOST with a delay, and the other stages hold nothing."""
    with stack(tmp_path, options=SLOW) as running:
        others = [address for name, address in running.addresses.items() if name != kind]
        async with under_way(running.address) as (_, call):
            os.kill(running.stages[kind].pid, signal.SIGKILL)
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                async for _ in read_all(call):
                    pass
            told = refusal(failed.value)
            assert (told.code, told.reason) == (grpc.StatusCode.UNAVAILABLE, "STAGE_LOST")
            assert told.retry_delay_s is not None
            await all_free(others)
