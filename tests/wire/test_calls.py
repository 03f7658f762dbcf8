"""Calls whose clients leave while the last is written to them."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from contextlib import nullcontext
from typing import Any

import grpc
import grpc.aio
import pytest
import structlog.testing

from helpers.ask import request
from helpers.chain import addresses_of
from helpers.converse import Conversation
from helpers.leaving import Leaving
from helpers.run import Caller, open_of, params
from helpers.servers import Local, all_free, is_free, local_chain, local_router, local_stage, omni_stub, stage_stub, toy_logic, watch_until
from helpers.waiting import until
from omnistage.v1 import omni_pb2, stage_pb2
from omnistage.wire.calls import as_stream
from omnistage.wire.errors import StageError


async def _write(context: grpc.aio.ServicerContext[Any, Any]) -> None:
    while True:
        await context.write(b"x")
        await asyncio.sleep(0)


async def _refuse(rng: random.Random, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    remaining_s = context.time_remaining()
    assert remaining_s is not None
    await asyncio.sleep(max(0.0, remaining_s + rng.uniform(-0.002, 0.004)))
    raise StageError("DEADLINE", "the time is over")


@pytest.mark.parametrize("way", ["write", "generate", "refuse"])
async def test_no_write_to_a_client_that_is_gone_is_logged_as_a_bug(way: str, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """Its time is over, and the server may learn of it from the write that fails, before gRPC tells it."""
    rng = random.Random(seed)

    async def serve(_: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await (_write(context) if way == "write" else _refuse(rng, context))

    async def generate(_: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
        while True:
            yield b"x"
            await asyncio.sleep(0)

    server = grpc.aio.server()
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_stream_rpc_method_handler(generate if way == "generate" else serve)
    server.add_registered_method_handlers("a.Service", {"Call": as_stream(handler, lambda _: nullcontext(), 5.0)})
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        method: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream("/a.Service/Call")

        async def hear() -> None:
            call = method(b"", timeout=rng.uniform(0.005, 0.03))
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                while await call.read() is not grpc.aio.EOF:
                    pass
            assert raised.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED

        for _ in range(100):
            await asyncio.gather(*(hear() for _ in range(10)))
    await server.stop(1)
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING] == []


async def of_run(stage: Local, last: int) -> None:
    async with stage_stub(stage.address) as stub:
        description = await stub.Describe(stage_pb2.DescribeRequest(), timeout=10)
        caller = Caller(stub)
        await caller.send(open=open_of(description, params=params("thinker", max_tokens=20_000, ignore_eos=True)))
        for _ in range(last):
            await caller.read()
        await watch_until(stage.address, is_free)
        caller.call.cancel()


@pytest.mark.parametrize("last", range(6))
async def test_a_write_that_finds_no_caller_ends_a_session_and_is_no_bug(last: int) -> None:
    leaving = Leaving("Run", last)
    with structlog.testing.capture_logs() as logs:
        async with local_stage(toy_logic("thinker"), interceptors=[leaving]) as stage:
            await of_run(stage, last)
            assert leaving.left == 1
            assert ended(stage, "omnistage_stage_sessions_total") == {"CANCELLED": 1}
    assert [entry for entry in logs if entry["log_level"] != "info"] == []


@pytest.mark.parametrize("last", range(6))
@pytest.mark.parametrize("method", ["Generate", "Converse"])
async def test_a_write_that_finds_no_client_ends_an_answer_and_is_no_bug(method: str, last: int) -> None:
    leaving = Leaving(method, last)
    endless = request(thinker={"max_tokens": 20_000, "ignore_eos": True})
    with structlog.testing.capture_logs() as logs:
        async with (
            local_chain() as stages,
            local_router(addresses_of(stages), interceptors=[leaving]) as router,
            omni_stub(router.address) as stub,
        ):
            call = Conversation(stub).call if method == "Converse" else stub.Generate(endless, timeout=60)
            if isinstance(call, grpc.aio.StreamStreamCall):
                await call.write(omni_pb2.ConverseRequest(turn=endless))
            for _ in range(last):
                await call.read()
            await until(lambda: ended(router, "omnistage_router_requests_total") == {"CANCELLED": 1})
            await all_free([stage.address for stage in stages.values()])
            assert leaving.left == 1
            call.cancel()
    assert [entry for entry in logs if entry["log_level"] != "info"] == []


def ended(server: Local, metric: str) -> dict[str, float]:
    """Sessions or requests that ended, by their reasons."""
    found = server.registry.collect()
    return {sample.labels["reason"]: sample.value for each in found for sample in each.samples if sample.name == metric and sample.value}
