"""A stage dials only what it was told it may."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from helpers.run import Caller, open_of
from helpers.servers import local_stage, stage_stub, toy_logic
from omnistage.stage.allowlist import AllowList
from omnistage.v1 import stage_pb2


@pytest.mark.parametrize(
    ("patterns", "address", "allowed"),
    [
        (["127.0.0.1:*"], "127.0.0.1:50051", True),
        (["127.0.0.1:50051"], "127.0.0.1:50051", True),
        (["127.0.0.1:50051"], "127.0.0.1:50052", False),
        (["127.0.0.1:50051"], "127.0.0.1:5005", False),
        (["10.0.0.*:50051"], "10.0.0.7:50051", True),
        (["10.0.0.*:50051"], "10.0.1.7:50051", False),
        (["talker-?.svc:50051"], "talker-3.svc:50051", True),
        (["talker-?.svc:50051"], "talker-33.svc:50051", False),
        (["*"], "host:1", True),
        (["*"], "dns:///host:1", False),
        (["*"], "ipv4:127.0.0.1:1", False),
        (["*"], "unix:/run/x", False),
        (["*"], "unix-abstract:x", False),
        (["*"], "127.0.0.1:1@127.0.0.1:2", False),
        (["*"], "127.0.0.1:1,127.0.0.1:2", False),
        (["*"], "127.0.0.1:1\n", False),
        (["*"], "127.0.0.1", False),
        (["*"], "", False),
        (["[::1]:*"], "[::1]:50051", True),
        (["[::1]:*"], "[::2]:50051", False),
        (["[::1]:*"], "1:50051", False),
        ([], "127.0.0.1:1", False),
    ],
)
def test_what_is_allowed(patterns: list[str], address: str, allowed: bool):
    assert AllowList(patterns).allows(address) is allowed


class Ear:
    """A listening port that counts who connects."""

    def __init__(self) -> None:
        self.heard = 0
        self.connected = asyncio.Event()

    async def hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heard += 1
        self.connected.set()
        writer.close()


@asynccontextmanager
async def listening(path: Path) -> AsyncIterator[tuple[Ear, int]]:
    """An Ear on a TCP port and on a Unix socket."""
    ear = Ear()
    async with await asyncio.start_server(ear.hear, "127.0.0.1", 0) as tcp, await asyncio.start_unix_server(ear.hear, path):
        yield ear, tcp.sockets[0].getsockname()[1]


ATTEMPTS = [
    "127.0.0.1:{port}",
    "localhost:{port}",
    "dns:///127.0.0.1:{port}",
    "dns:127.0.0.1:{port}",
    "ipv4:127.0.0.1:{port}",
    "ipv4:10.9.8.7:1,127.0.0.1:{port}",
    "unix:{path}",
    "unix://{path}",
    "10.9.8.7:1@127.0.0.1:{port}",
    "127.0.0.1:{port}@10.9.8.7:1",
    "10.9.8.7:1,127.0.0.1:{port}",
    "10.9.8.7:1 127.0.0.1:{port}",
    "10.9.8.7:1/../127.0.0.1:{port}",
    "127.0.0.1:{port}#10.9.8.7:1",
    "[::ffff:127.0.0.1]:{port}",
    "http://127.0.0.1:{port}",
]


async def test_an_address_that_is_not_allowed_is_never_dialled(tmp_path: Path):
    """Not even when an allowed one stands beside it, or when the text of the address begins like an allowed one."""
    async with (
        listening(tmp_path / "ear") as (ear, port),
        local_stage(toy_logic("talker"), allow=("10.9.8.7:1", "10.9.8.7:*")) as server,
        stage_stub(server.address) as stub,
    ):
        description = await stub.Describe(stage_pb2.DescribeRequest(), timeout=10)
        for attempt in ATTEMPTS:
            address = attempt.format(port=port, path=tmp_path / "ear")
            for addresses in ([address], ["10.9.8.7:1", address]):
                hop = stage_pb2.Hop(kind=stage_pb2.STAGE_KIND_CODE2WAV, model="toy-code2wav", addresses=addresses, takes=["codes"])
                caller = Caller(stub)
                await caller.send(open=open_of(description, route=[hop]))
                ended = await caller.expect("BAD_REQUEST", grpc.StatusCode.INVALID_ARGUMENT)
                assert ended.metadata["field"] == "open.route.addresses" and "--allow" in ended.message
        assert ear.heard == 0


async def test_an_address_that_is_allowed_is_dialled(tmp_path: Path):
    """The other test could not fail if the ear were deaf."""
    async with (
        listening(tmp_path / "ear") as (ear, port),
        local_stage(toy_logic("talker"), allow=(f"127.0.0.1:{port}",)) as server,
        stage_stub(server.address) as stub,
    ):
        description = await stub.Describe(stage_pb2.DescribeRequest(), timeout=10)
        hop = stage_pb2.Hop(kind=stage_pb2.STAGE_KIND_CODE2WAV, model="toy-code2wav", addresses=[f"127.0.0.1:{port}"], takes=["codes"])
        caller = Caller(stub)
        await caller.send(open=open_of(description, route=[hop]))
        await caller.expect("STAGE_LOST", grpc.StatusCode.UNAVAILABLE)
        async with asyncio.timeout(10):
            await ear.connected.wait()
