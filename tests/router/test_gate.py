"""The gate before a router's services: calls pass as they are, and one whose request never comes ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import cast

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from helpers.ask import refusal
from helpers.servers import CLIENT_OPTIONS
from omnistage.router.admission import Gate

CHECK = f"/{health.SERVICE_NAME}/Check"


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    """To a server with health and reflection behind a gate that waits a second for a request."""
    server = grpc.aio.server(interceptors=[Gate(request_limit_s=1.0)])
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    reflection.enable_server_reflection((health.SERVICE_NAME,), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CLIENT_OPTIONS) as to:
            yield to
    finally:
        await server.stop(0)


async def test_calls_of_every_shape_pass(channel: grpc.aio.Channel):
    stub = health_pb2_grpc.HealthStub(channel)
    serving = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
    assert await stub.Check(health_pb2.HealthCheckRequest(), timeout=10) == serving
    watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=10)
    assert await watch.read() == serving
    watch.cancel()
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    said = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([asked]), timeout=10)
    services = cast(reflection_pb2.ServerReflectionResponse, await said.read()).list_services_response.service
    assert [service.name for service in services] == [health.SERVICE_NAME]


async def test_errors_pass_too(channel: grpc.aio.Channel):
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="none"), timeout=10)
    assert raised.value.code() == grpc.StatusCode.NOT_FOUND
    unknown: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/none/None")
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await unknown(b"", timeout=10)
    assert raised.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_bytes_that_are_no_request_are_refused_as_that(channel: grpc.aio.Channel):
    check: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(CHECK)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await check(b"\xff\xff\xff\xff", timeout=30)
    told = refusal(raised.value)
    assert (told.code, told.reason, told.fields) == (grpc.StatusCode.INVALID_ARGUMENT, "BAD_REQUEST", ["request"])


@pytest.mark.parametrize("closed", [False, True], ids=["open", "half-closed"])
async def test_a_call_whose_request_never_comes_ends(channel: grpc.aio.Channel, closed: bool):
    stream: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(CHECK)
    call = stream(timeout=30)
    if closed:
        await call.done_writing()
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call.read()
    told = refusal(raised.value)
    assert (told.reason, told.fields) == ("BAD_REQUEST", ["request"])
