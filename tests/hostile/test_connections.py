"""Connections on which nobody asks anything, as many as a server may have descriptors; and one client that opens more calls than a router
takes, and leaves them: another one is answered."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from helpers import lengths
from helpers.ask import ask, refusal, refused, request
from helpers.servers import (
    CLIENT_OPTIONS,
    ServerProcess,
    ServerProcesses,
    local_chain,
    local_router,
    local_stage,
    omni_stub,
    stack,
    stage_flags,
    stage_stub,
    toy_logic,
)
from helpers.waiting import until
from omnistage.client import AsyncOmni, Omni
from omnistage.v1 import omni_pb2_grpc, stage_pb2, stage_pb2_grpc
from omnistage.wire import channel as channels
from omnistage.wire.channel import server_options
from omnistage.wire.limits import MAX_CALLS
from omnistage.wire.token import GATEWAY_HOST, GATEWAY_KEY, Token

ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])}
DESCRIPTORS = 256
SILENT = b""
IDLE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
"""As a client of HTTP/2 begins, with empty settings."""
SAID = {"silent": SILENT, "idle": IDLE}


def visit(address: str, said: bytes) -> socket.socket:
    host, _, port = address.rpartition(":")
    visitor = socket.create_connection((host, int(port)), timeout=30)
    visitor.sendall(said)
    return visitor


def is_closed(visitor: socket.socket) -> bool:
    """Whether the server has closed a connection; what it says before is read."""
    visitor.setblocking(False)
    try:
        while visitor.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
    return True


def flood(address: str, said: bytes, visits: ExitStack) -> list[socket.socket]:
    """More connections than the server may have descriptors; those that it closes at once are closed here too."""
    visitors = []
    for _ in range(DESCRIPTORS + 50):
        with suppress(OSError):  # One that is closed before it has spoken.
            visitors.append(visits.enter_context(visit(address, said)))
    return visitors


def page(address: str) -> int:
    """The status of a server's page of metrics."""
    host, _, port = address.rpartition(":")
    connection = HTTPConnection(host, int(port), timeout=30)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().status
    finally:
        connection.close()


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@pytest.fixture(params=["router", "stage"])
def door(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServerProcess]:
    """A server with few descriptors."""
    with ExitStack() as servers:
        if request.param == "stage":
            words = ["omnistage.code2wav", str(DESCRIPTORS), "", *stage_flags()]
        else:
            chain = servers.enter_context(stack(tmp_path, router_args=None))
            stages = ",".join(f"{kind}={address}" for kind, address in chain.addresses.items())
            words = ["omnistage.router", str(DESCRIPTORS), "", "--pipeline", "toy", "--stages", stages, "--grace", "5"]
        server = servers.enter_context(ServerProcess("helpers.poor", *words, log_folder=tmp_path, environment=ENVIRONMENT))
        server.wait_ready()
        yield server


async def works(server: ServerProcess, channel: grpc.aio.Channel) -> None:
    if server.kind == "router":
        (await ask(omni_pb2_grpc.OmniServiceStub(channel), request("hm", 3))).check_toy(3, "hm")
    else:
        described = await stage_pb2_grpc.StageServiceStub(channel).Describe(stage_pb2.DescribeRequest(), timeout=30)
        assert described.kind == stage_pb2.STAGE_KIND_CODE2WAV


@lengths.one_or_all("said", SAID)
async def test_a_server_whose_door_is_full_has_descriptors_for_all_else(door: ServerProcess, said: str, seed: int):
    """For its log and its metrics, and for those who were there before; and for everybody again when the visitors have left."""
    said = lengths.draw(said, SAID, seed)
    async with grpc.aio.insecure_channel(door.address, options=CLIENT_OPTIONS) as channel:
        await channel.channel_ready()
        with ExitStack() as visits:
            visitors = await asyncio.to_thread(flood, door.address, SAID[said], visits)
            await until(lambda: sum(map(is_closed, visitors)) >= len(visitors) - DESCRIPTORS // 2)
            assert descriptors(door.pid) < DESCRIPTORS * 3 // 4
            assert await asyncio.to_thread(page, door.metrics_address) == 200
            await works(door, channel)
        async with grpc.aio.insecure_channel(door.address, options=CLIENT_OPTIONS) as another:
            async with asyncio.timeout(60):
                await another.channel_ready()
            await works(door, another)
    door.terminate()
    assert door.wait() == 0
    assert "Traceback" not in door.log()


async def test_one_who_does_not_say_what_he_speaks_is_left(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(channels, "HANDSHAKE_LIMIT_MS", 300)
    async with local_stage(toy_logic("code2wav")) as stage:
        with visit(stage.address, SILENT) as silent, visit(stage.address, IDLE[:20]) as slow, visit(stage.address, IDLE) as spoke:
            await until(lambda: is_closed(silent) and is_closed(slow))
            assert not is_closed(spoke)
            async with stage_stub(stage.address) as stub:
                assert (await stub.Describe(stage_pb2.DescribeRequest(), timeout=30)).kind == stage_pb2.STAGE_KIND_CODE2WAV


async def test_one_who_asks_nothing_is_left_and_one_who_watches_is_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(channels, "IDLE_LIMIT_MS", 300)
    async with local_stage(toy_logic("code2wav")) as stage, stage_stub(stage.address) as stub:
        watch = stub.Watch(stage_pb2.WatchRequest(), timeout=60)
        assert isinstance(await watch.read(), stage_pb2.WatchResponse)
        with visit(stage.address, IDLE) as idle:
            await until(lambda: is_closed(idle))
        with visit(stage.address, IDLE) as idle:  # Twice the limit at least.
            await until(lambda: is_closed(idle))
        for _ in range(2):
            assert isinstance(await watch.read(), stage_pb2.WatchResponse)
        watch.cancel()


@pytest.mark.parametrize("client", [AsyncOmni, Omni])
async def test_a_client_whose_connection_was_closed_meanwhile_does_not_notice(client: type[Any], monkeypatch: pytest.MonkeyPatch):
    """Its channel makes a new one with the next request."""
    monkeypatch.setattr(channels, "IDLE_LIMIT_MS", 200)
    async with local_chain() as chain, local_router({kind: stage.address for kind, stage in chain.items()}) as router:
        omni = client(address=router.address)

        async def generate() -> str:
            if client is AsyncOmni:
                return str((await omni.generate("hm", seed=3)).text)
            return await asyncio.to_thread(lambda: str(omni.generate("hm", seed=3).text))

        first = await generate()
        for _ in range(3):
            with visit(router.address, IDLE) as idle:
                await until(lambda: is_closed(idle))  # It is waited for here.
            assert await generate() == first
        await omni.close() if client is AsyncOmni else await asyncio.to_thread(omni.close)


async def test_one_connection_more_than_there_may_be_is_closed_as_it_comes():
    server = grpc.aio.server(options=server_options(max_connections=3))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    with ExitStack() as visits:
        first = [visits.enter_context(visit(f"127.0.0.1:{port}", IDLE)) for _ in range(3)]
        more = [visits.enter_context(visit(f"127.0.0.1:{port}", SILENT)) for _ in range(5)]
        await until(lambda: all(map(is_closed, more)))
        assert not any(map(is_closed, first))
        first[0].close()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CLIENT_OPTIONS) as channel, asyncio.timeout(60):
            await channel.channel_ready()
    await server.stop(0)


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
