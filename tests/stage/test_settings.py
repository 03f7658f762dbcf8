"""The choices of a stage are told once in its log, in its description and to the clients of its router. A stage takes calls from a caller
that shows the token of the stack; a link that shows another token says so."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import grpc
import grpc.aio
import pytest
import structlog
from grpc_channelz.v1 import channelz, channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health
from pydantic import ValidationError

from helpers.ask import ask, refusal, request
from helpers.chain import router_and_stages, toy_chain
from helpers.run import RunStream, open_of
from helpers.servers import (
    CHAIN,
    CLIENT_OPTIONS,
    Local,
    ServerProcess,
    local_router,
    local_stage,
    omni_stub,
    stage_flags,
    stage_stub,
    toy_logic,
)
from helpers.stage import hop_to
from helpers.watching import SETTLE_S
from omnistage.host.addresses import Name
from omnistage.host.errors import StartError
from omnistage.link.liveness import Channels
from omnistage.router.placement import Placement
from omnistage.stage.server import MAX_TOKENLESS, Guard, check_open
from omnistage.stage.settings import AllowList, StageSettings
from omnistage.v1 import omni_pb2, stage_pb2, stage_pb2_grpc
from omnistage.wire.channel import Credentials
from omnistage.wire.token import KEY, Token


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


UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
TOKEN = Token("the-right-one-0123456789")
OTHER = Token("another-one-0123456789!!")

Metadata = Sequence[tuple[str, str]]

WRONG: dict[str, Metadata] = {
    "none": (),
    "another": OTHER.metadata,
    "empty": ((KEY, ""),),
    "the beginning": ((KEY, TOKEN.secret[:-1]),),
    "longer": ((KEY, TOKEN.secret + "x"),),
    "in other letters": ((KEY, TOKEN.secret.upper()),),
    "under another name": (("authorization", TOKEN.secret),),
    "both": (*OTHER.metadata, *TOKEN.metadata),
    "twice": (*TOKEN.metadata, *TOKEN.metadata),
}


@asynccontextmanager
async def stage(kind: str = "talker") -> AsyncIterator[tuple[Local, stage_pb2_grpc.StageServiceAsyncStub]]:
    """A stage with the token; in the end a caller that shows it is still taken."""
    async with local_stage(toy_logic(kind), token=TOKEN) as server, stage_stub(server.address) as stub:
        yield server, stub
        caller = RunStream(stub, metadata=TOKEN.metadata)
        await caller.send(open=open_of(await stub.Describe(stage_pb2.DescribeRequest(), timeout=10, metadata=TOKEN.metadata)))
        await caller.opened()
        caller.call.cancel()


@pytest.mark.parametrize("shown", WRONG.values(), ids=WRONG.keys())
async def test_a_call_without_the_token_is_refused_with_a_typed_error(shown: Metadata):
    async with stage() as (_, stub):
        good = await stub.Describe(stage_pb2.DescribeRequest(), timeout=10, metadata=TOKEN.metadata)
        with pytest.raises(grpc.aio.AioRpcError) as described:
            await stub.Describe(stage_pb2.DescribeRequest(), timeout=10, metadata=tuple(shown))
        with pytest.raises(grpc.aio.AioRpcError) as watched:
            await anext(aiter(stub.Watch(stage_pb2.WatchRequest(), timeout=10, metadata=tuple(shown))))
        for failed in (described.value, watched.value):
            told = refusal(failed)
            assert (told.code, told.reason) == (UNAUTHENTICATED, "UNAUTHENTICATED")
            assert "OMNISTAGE_TOKEN" in (failed.details() or "") and TOKEN.secret not in str(failed)
        caller = RunStream(stub, metadata=shown)
        await caller.send(open=open_of(good))
        ended = await caller.expect("UNAUTHENTICATED", UNAUTHENTICATED)
        assert TOKEN.secret not in ended.message


async def test_a_refused_caller_is_not_waited_for_and_what_it_sends_is_not_read():
    """It sends no message at all, or bytes that are none, or nothing but goes on."""
    run = "/omnistage.v1.StageService/Run"
    async with stage() as (server, _), grpc.aio.insecure_channel(server.address, options=CLIENT_OPTIONS) as channel:
        silent: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(run)(timeout=30)
        assert isinstance(await silent.read(), bytes)
        assert await silent.code() == UNAUTHENTICATED
        loud: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(run)(timeout=30)
        await loud.write(b"\xff" * 1000)
        ended = stage_pb2.RunResponse.FromString(await loud.read())  # type: ignore[arg-type]
        assert ended.ended.reason == "UNAUTHENTICATED"
        await loud.done_writing()
        assert await loud.code() == UNAUTHENTICATED
        unknown: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/omnistage.v1.StageService/Other")
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await unknown(b"", timeout=10)
        assert failed.value.code() == UNAUTHENTICATED


@asynccontextmanager
async def guarded() -> AsyncIterator[grpc.aio.Channel]:
    """To a server with health and channelz behind the guard."""
    server = grpc.aio.server(interceptors=[Guard(TOKEN)])
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    channelz.add_channelz_servicer(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CLIENT_OPTIONS) as channel:
            yield channel
    finally:
        await server.stop(0)


async def test_channelz_is_behind_the_token_too():
    async with guarded() as channel:
        stub = channelz_pb2_grpc.ChannelzStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.GetServers(channelz_pb2.GetServersRequest(), timeout=10)
        assert failed.value.code() == UNAUTHENTICATED
        assert (await stub.GetServers(channelz_pb2.GetServersRequest(), timeout=10, metadata=TOKEN.metadata)).server


async def test_calls_without_the_token_are_counted_and_take_nothing_from_others():
    """Watchers of the health up to the limit. One more is told when to come again; who checks it and who shows the token is served, and so
    is the next one when a watcher has gone."""
    asked = health_pb2.HealthCheckRequest()
    async with guarded() as channel, asyncio.timeout(SETTLE_S):
        stub: health_pb2_grpc.HealthAsyncStub = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(asked) for _ in range(MAX_TOKENLESS)]
        for watch in watches:
            assert isinstance(await watch.read(), health_pb2.HealthCheckResponse)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.Watch(asked).read()
        told = refusal(failed.value)
        assert (told.code, told.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED") and told.retry_delay_s
        assert (await stub.Check(asked)).status == health_pb2.HealthCheckResponse.SERVING
        assert isinstance(await stub.Watch(asked, metadata=TOKEN.metadata).read(), health_pb2.HealthCheckResponse)
        watches[0].cancel()
        while True:
            with suppress(grpc.aio.AioRpcError):
                assert isinstance(await stub.Watch(asked).read(), health_pb2.HealthCheckResponse)
                break


@pytest.mark.parametrize("method", ["Check", "Watch"])
async def test_a_call_without_the_token_that_never_asks_is_ended(method: str):
    async with guarded() as channel:
        mute: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(f"/grpc.health.v1.Health/{method}")(timeout=SETTLE_S)
        assert await mute.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "did not come" in str(await mute.details())
        good = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert good.status == health_pb2.HealthCheckResponse.SERVING


async def test_bytes_that_are_no_request_are_refused_as_that():
    async with guarded() as channel:
        check: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/grpc.health.v1.Health/Check")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await check(b"\xff\xff\xff\xff", timeout=SETTLE_S)
        told = refusal(raised.value)
        assert (told.code, told.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "BAD_REQUEST")


# The servers of a stack ------------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def chain(**tokens: Token | None) -> AsyncIterator[dict[str, str]]:
    """Addresses of toy stages, each with its own token."""
    async with AsyncExitStack() as exits:
        yield {kind: (await exits.enter_async_context(local_stage(toy_logic(kind), token=tokens[kind]))).address for kind in CHAIN}


async def test_servers_with_one_token_answer():
    async with (
        chain(thinker=TOKEN, talker=TOKEN, code2wav=TOKEN) as addresses,
        local_router(addresses, token=TOKEN) as router,
        omni_stub(router.address) as stub,
    ):
        (await ask(stub, request("hello", 3))).check_toy(3, "hello")


async def test_a_stage_that_refuses_its_neighbour_is_named_and_not_asked_for_ever():
    """The router knows the token of all three, the Thinker shows the Talker another one: the client learns that, and when to come again."""
    async with (
        chain(thinker=None, talker=TOKEN, code2wav=TOKEN) as addresses,
        local_router(addresses, token=TOKEN) as router,
        omni_stub(router.address) as stub,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await ask(stub, request("hello", 3), timeout_s=30)
        told = refusal(failed.value)
        assert (told.code, told.reason) == (grpc.StatusCode.UNAVAILABLE, "STAGE_LOST") and told.retry_delay_s
        assert f"talker at {addresses['talker']} refuses" in (failed.value.details() or "")
        assert "OMNISTAGE_TOKEN" in (failed.value.details() or "")


async def test_a_replica_that_refuses_is_passed_over_for_one_that_does_not():
    async with (
        chain(thinker=None, talker=TOKEN, code2wav=None) as addresses,
        local_stage(toy_logic("talker")) as other,
        local_router({"thinker": addresses["thinker"], "code2wav": addresses["code2wav"], "talker": other.address}) as router,
        omni_stub(router.address) as stub,
        stage_stub(addresses["thinker"]) as thinker,
    ):
        (await ask(stub, request("hello", 3))).check_toy(3, "hello")
        hop = hop_to(addresses["talker"], other.address, kind="talker")
        caller = RunStream(thinker)
        await caller.send(open=open_of(await thinker.Describe(stage_pb2.DescribeRequest(), timeout=10), route=[hop]))
        await caller.opened()
        caller.call.cancel()


async def test_a_router_with_another_token_says_so_once_and_finds_the_stage_when_it_is_right():
    with structlog.testing.capture_logs() as logs:
        async with local_stage(toy_logic("thinker"), token=TOKEN) as server, Channels(Credentials(), token=OTHER) as channels:
            placement = Placement(channels, {"thinker": [server.address]})
            watching = asyncio.create_task(placement.watch())
            try:
                (replica,) = placement.all()
                async with asyncio.timeout(SETTLE_S):
                    while not replica.refused:
                        await placement.changed.wait()
                    channels.metadata = TOKEN.metadata
                    await placement.descriptions()
                assert not replica.refused
            finally:
                watching.cancel()
                await asyncio.wait({watching})
    (told,) = [entry for entry in logs if entry["event"] == "replica.refuses_our_token"]
    assert (told["log_level"], told["stage"], told["address"]) == ("error", "thinker", server.address)
    assert "OMNISTAGE_TOKEN" in told["why"]
    assert TOKEN.secret not in str(logs) and OTHER.secret not in str(logs)


# The form of a token, and the addresses that need one -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "secret", ["", "short", "x" * 15, "x" * 513, "with a blank inside it", "new\nline-0123456789", "ümlaut-0123456789"]
)
def test_what_is_no_token(secret: str):
    with pytest.raises(ValueError, match="16 to 512") as failed:
        Token(secret)
    assert not secret or secret not in str(failed.value)


def test_a_token_does_not_show():
    assert TOKEN.secret not in f"{TOKEN} {TOKEN!r}"


@pytest.mark.parametrize("address", ["127.0.0.1:0", "127.8.9.1:50051", "[::1]:0", "localhost:0"])
def test_a_stage_without_a_token_may_listen_on_loopback(address: str):
    check_open(address)


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "10.9.8.7:50051", "[fe80::1]:50051", "8.8.8.8:1", "no-such-name.invalid:50051"])
def test_a_stage_without_a_token_may_not_listen_elsewhere(address: str):
    with pytest.raises(StartError, match=r"OMNISTAGE_TOKEN.*127\.0\.0\.1"):
        check_open(address)
