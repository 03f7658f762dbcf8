"""One client that opens more calls than a router takes, and leaves them: another one is answered, and so are health checks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from helpers import lengths
from helpers.ask import ask, refusal, refused, request
from helpers.servers import CLIENT_OPTIONS, ServerProcesses, omni_stub, stack
from helpers.waiting import until
from omnistage.v1 import omni_pb2_grpc
from omnistage.wire.limits import MAX_CALLS
from omnistage.wire.token import GATEWAY_HOST, GATEWAY_KEY, Token

WATCH = "/grpc.health.v1.Health/Watch"
GENERATE = "/omnistage.v1.OmniService/Generate"
LIST_MODELS = "/omnistage.v1.OmniService/ListModels"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
METHODS = {path.rpartition("/")[2]: path for path in (GENERATE, LIST_MODELS, REFLECTION, WATCH)}

Call = grpc.aio.StreamStreamCall[bytes, bytes]


TOKEN = Token("s" * 32)
ELSEWHERE = [(GATEWAY_KEY, TOKEN.for_gateway().secret), (GATEWAY_HOST, "elsewhere")]
"""Metadata of a gateway's call for a client of another host."""


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcesses]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMNISTAGE_TOKEN", TOKEN.secret)
        with stack(tmp_path_factory.mktemp("calls")) as running:
            yield running


@lengths.one_or_all("name", METHODS)
async def test_idle_calls_of_one_host_are_not_all_calls_of_a_router(standing: ServerProcesses, name: str, seed: int):
    """The first message never comes, but that of a watch."""
    method = METHODS[lengths.draw(name, METHODS, seed)]
    async with grpc.aio.insecure_channel(standing.address, options=CLIENT_OPTIONS) as channel, omni_stub(standing.address) as other:
        health = health_pb2_grpc.HealthStub(channel)
        stream: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(method)
        calls: list[Call] = []
        for _ in range(MAX_CALLS + 100):
            calls.append(stream(timeout=100))
            if method == WATCH:
                with suppress(grpc.aio.AioRpcError):  # Refused already.
                    await calls[-1].write(health_pb2.HealthCheckRequest().SerializeToString())
        await until(lambda: sum(call.done() for call in calls) >= 100)  # It has as many as it takes.
        checked = await health.Check(health_pb2.HealthCheckRequest(), timeout=30)
        assert checked.status == health_pb2.HealthCheckResponse.SERVING
        (await ask(other, request("hm", 3), metadata=ELSEWHERE)).check_toy(3, "hm")
        assert not all(call.done() for call in calls)
        mine = omni_pb2_grpc.OmniServiceStub(channel)
        if method != WATCH:
            told = await refused(mine, request("hm", 3))
            assert told.reason == "OVERLOADED" and told.retry_delay_s
        for call in calls:
            call.cancel()
        answer = None
        async with asyncio.timeout(30):
            while answer is None:
                try:
                    answer = await ask(mine, request("hm", 3))
                except grpc.aio.AioRpcError as error:  # The router has not heard of the end of all of them.
                    assert refusal(error).reason == "OVERLOADED"
        answer.check_toy(3, "hm")
    assert standing.router is not None and "Traceback" not in standing.router.log()
