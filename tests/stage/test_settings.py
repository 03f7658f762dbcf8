"""The choices of a stage are told once in its log, in its description and to the clients of its router; it dials only what it was told it
may."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from pydantic import ValidationError

from helpers.chain import router_and_stages, toy_chain
from helpers.run import RunStream, open_of
from helpers.servers import CHAIN, ServerProcess, local_stage, stage_flags, stage_stub, toy_logic
from omnistage.host.addresses import Name
from omnistage.stage.settings import AllowList, StageSettings
from omnistage.v1 import omni_pb2, stage_pb2


async def test_what_was_chosen_is_logged_once_and_described(tmp_path: Path) -> None:
    flags = [*stage_flags(), "--gpu-memory-utilization", "0.5", "--max-sessions", "3"]
    with ServerProcess("omnistage.thinker", *flags, log_folder=tmp_path) as server:
        server.wait_ready()
        async with stage_stub(server.address) as stub:
            described = await stub.Describe(stage_pb2.DescribeRequest())
        log = [json.loads(line) for line in server.log().splitlines() if line.startswith("{")]
    expected = {
        "family": "toy",
        "checkpoint": "own",
        "device": "cpu (default)",
        "dtype": "float32 (default)",
        "threads": "1 (default)",
        "gpu_memory_utilization": "0.5, which means nothing on a CPU",
    }
    assert dict(described.settings) == expected
    (loaded,) = [entry for entry in log if entry["event"] == "model.loaded"]
    assert {name: loaded[name] for name in expected} == expected
    assert (loaded["kind"], loaded["model"], loaded["revision"]) == ("thinker", "toy-thinker", described.revision)


async def test_the_router_carries_what_its_stages_chose() -> None:
    logics = toy_chain()
    for kind, logic in zip(CHAIN, logics, strict=True):
        logic.description.settings["device"] = f"that of the {kind}"
    async with router_and_stages(logics) as stack:
        replicas = (await stack.stub.ListReplicas(omni_pb2.ListReplicasRequest())).replicas
    assert [replica.settings["device"] for replica in replicas] == [f"that of the {kind}" for kind in CHAIN]


# Addresses that a stage may dial --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entries", "address", "allowed"),
    [
        (["127.0.0.1:50051"], "127.0.0.1:50051", True),
        (["127.0.0.1:50051"], "127.0.0.1:50052", False),
        (["127.0.0.1:50051"], "127.0.0.1:5005", False),
        (["127.0.0.1:50051"], "127.0.0.1:050051", False),
        (["10.0.0.7:50051", "10.0.0.8:50051"], "10.0.0.8:50051", True),
        (["10.0.0.7:50051", "10.0.0.8:50051"], "10.0.0.9:50051", False),
        (["host:1"], "host:1", True),
        (["host:1"], "dns:///host:1", False),
        (["dns:///host:1"], "dns:///host:1", False),
        (["127.0.0.1:1"], "ipv4:127.0.0.1:1", False),
        (["127.0.0.1:1"], "unix:/run/x", False),
        (["127.0.0.1:1"], "127.0.0.1:1@127.0.0.1:2", False),
        (["127.0.0.1:1"], "127.0.0.1:1,127.0.0.1:2", False),
        (["127.0.0.1:1"], "127.0.0.1:1\n", False),
        (["127.0.0.1:1"], "127.0.0.1", False),
        (["127.0.0.1:1"], "", False),
        (["[::1]:50051"], "[::1]:50051", True),
        (["[::1]:50051"], "[::2]:50051", False),
        (["[::1]:50051"], "1:50051", False),
        ([], "127.0.0.1:1", False),
    ],
)
async def test_what_is_allowed(entries: list[str], address: str, allowed: bool):
    assert await AllowList(entries, ZoneOfAnswers({})).allows(address) is allowed


@pytest.mark.parametrize("entry", ["*", "*:50051", "127.0.0.1:*", "10.0.0.*:50051", "talker-?.svc:50051", "dns:///*:50051"])
def test_a_pattern_is_refused_with_what_to_write_instead(entry: str):
    with pytest.raises(ValueError, match=r"is a pattern: write each address, HOST:PORT.* talker:50051"):
        AllowList([entry])
    with pytest.raises(ValidationError, match="is a pattern"):
        StageSettings(family="toy", allow=("127.0.0.1:1", entry))


@pytest.mark.parametrize(
    "entry",
    [
        "talker",
        "127.0.0.1",
        "ipv4:127.0.0.1:1",
        "http://127.0.0.1:1",
        "unix:/run/x",
        "127.0.0.1:1 ",
        "",
        "10.0.0.1:99999",
        "dns:///a:99999",
    ],
)
def test_what_is_no_address_is_no_entry(entry: str):
    with pytest.raises(ValueError, match=r"dns:///NAME:PORT stands for all addresses|no possible port"):
        AllowList([entry])


class ZoneOfAnswers:
    """Answers about names, as a test sets them, and how often each was asked for."""

    def __init__(self, addresses: dict[str, list[str]]) -> None:
        self.addresses = addresses
        self.asked = Counter[str]()

    async def __call__(self, name: Name) -> list[str]:
        self.asked[name.host] += 1
        if name.host not in self.addresses:
            raise OSError("no such name")
        return [f"{address}:{name.port}" for address in self.addresses[name.host]]


@pytest.mark.parametrize("entry", ["talker:50051", "dns:///talker:50051"])
async def test_every_address_that_a_name_has_is_allowed_and_no_other(entry: str):
    allow = AllowList(["10.9.9.9:1", entry], ZoneOfAnswers({"talker": ["10.0.0.1", "10.0.0.2"], "other": ["10.0.0.3"]}))
    for address in ("10.0.0.1:50051", "10.0.0.2:50051", "10.9.9.9:1"):
        assert await allow.allows(address), address
    for address in ("10.0.0.1:50052", "10.0.0.3:50051", "10.9.9.9:50051", "10.0.0.1:5005", "other:50051"):
        assert not await allow.allows(address), address


async def test_a_container_that_comes_is_allowed_and_one_that_went_is_not():
    now = 0.0
    zone = ZoneOfAnswers({"talker": ["10.0.0.1"]})
    allow = AllowList(["talker:50051"], zone, clock=lambda: now)
    assert await allow.allows("10.0.0.1:50051") and not await allow.allows("10.0.0.2:50051")
    zone.addresses = {"talker": ["10.0.0.2"]}
    assert await allow.allows("10.0.0.1:50051") and zone.asked["talker"] == 1, "an answer holds for a second"
    now = 1.0
    assert await allow.allows("10.0.0.2:50051") and not await allow.allows("10.0.0.1:50051")
    assert zone.asked["talker"] == 2


async def test_a_name_that_cannot_be_looked_up_has_the_addresses_that_it_had():
    now = 0.0
    zone = ZoneOfAnswers({"talker": ["10.0.0.1"]})
    allow = AllowList(["talker:50051"], zone, clock=lambda: now)
    assert await allow.allows("10.0.0.1:50051")
    zone.addresses, now = {}, 5.0
    assert await allow.allows("10.0.0.1:50051") and not await allow.allows("10.0.0.2:50051")
    assert zone.asked["talker"] == 2, "one lookup that fails is enough for a second"


async def test_the_system_is_asked_and_many_may_wait_for_one_lookup():
    allow = AllowList(["localhost:50051"])
    assert await asyncio.gather(*(allow.allows("127.0.0.1:50051") for _ in range(20))) == [True] * 20
    assert not await allow.allows("127.0.0.2:50051")


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
        local_stage(toy_logic("talker"), allow=("10.9.8.7:1", "127.0.0.1:1")) as server,
        stage_stub(server.address) as stub,
    ):
        description = await stub.Describe(stage_pb2.DescribeRequest(), timeout=10)
        for attempt in ATTEMPTS:
            address = attempt.format(port=port, path=tmp_path / "ear")
            for addresses in ([address], ["10.9.8.7:1", address]):
                hop = stage_pb2.Hop(kind=stage_pb2.STAGE_KIND_CODE2WAV, model="toy-code2wav", addresses=addresses, takes=["codes"])
                caller = RunStream(stub)
                await caller.send(open=open_of(description, route=[hop]))
                ended = await caller.expect("BAD_REQUEST", grpc.StatusCode.INVALID_ARGUMENT)
                assert ended.metadata["field"] == "open.route.addresses" and "--allow" in ended.message
        assert ear.heard == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_an_address_that_is_allowed_is_dialled(tmp_path: Path, host: str):
    """The other test could not fail if the ear were deaf."""
    async with (
        listening(tmp_path / "ear") as (ear, port),
        local_stage(toy_logic("talker"), allow=(f"{host}:{port}",)) as server,
        stage_stub(server.address) as stub,
    ):
        description = await stub.Describe(stage_pb2.DescribeRequest(), timeout=10)
        hop = stage_pb2.Hop(kind=stage_pb2.STAGE_KIND_CODE2WAV, model="toy-code2wav", addresses=[f"127.0.0.1:{port}"], takes=["codes"])
        caller = RunStream(stub)
        await caller.send(open=open_of(description, route=[hop]))
        # It says nothing, and is the only one: the stage waits for it as long as it may.
        async with asyncio.timeout(30):
            await ear.connected.wait()
