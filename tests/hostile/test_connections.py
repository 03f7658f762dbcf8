"""Connections on which nobody asks anything: as many as a server may have descriptors, from somebody who needs no token for that."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from helpers import lengths
from helpers.ask import ask, request
from helpers.servers import CLIENT_OPTIONS, ServerProcess, local_chain, local_router, local_stage, stack, stage_flags, stage_stub, toy_logic
from helpers.waiting import until
from omnistage.client import AsyncOmni, Omni
from omnistage.v1 import omni_pb2_grpc, stage_pb2, stage_pb2_grpc
from omnistage.wire import channel as channels
from omnistage.wire.channel import server_options

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
