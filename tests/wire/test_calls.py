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
