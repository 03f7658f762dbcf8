"""The door of a router: its places, turns at reading large requests, the properties of calls by which it tells clients apart, and the gate.
The policy of places has tests of its own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import cast

import grpc
import grpc.aio
import pytest
from grpc.aio import Metadata
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from helpers.ask import refusal
from helpers.servers import CLIENT_OPTIONS
from omnistage.host.places import Client
from omnistage.router.admission import MAX_LARGE, STALLED_S, Admission, Gate, Place, Turns
from omnistage.router.callers import Callers, client_text, name_of, request_of, scope_of
from omnistage.wire.errors import StageError
from omnistage.wire.token import GATEWAY_HOST, GATEWAY_KEY, Token


def house(limit: int, share: float = 1.0) -> Admission:
    return Admission(lambda: limit, share)


async def test_a_place_is_free_again_whatever_happened_in_it():
    admission = house(1)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            async with admission.place(Client("me")):
                raise ZeroDivisionError
    async with admission.place(Client("me")):
        assert admission.running == 1


async def inside(admission: Admission, client: str) -> Place:
    async with admission.place(Client(client)) as place:
        return place


async def waits(admission: Admission, client: str) -> asyncio.Task[Place]:
    """Another client that has come to wait."""
    before = admission.waiting
    task = asyncio.create_task(inside(admission, client))
    await asyncio.sleep(0)  # Its first step is to ask.
    assert admission.waiting == before + 1
    return task


async def test_who_waits_too_long_or_while_the_house_closes_is_told():
    admission = house(1)
    async with asyncio.timeout(30), admission.place(Client("me")):
        with pytest.raises(StageError, match="OVERLOADED") as raised:
            await (await waits(admission, "other"))
        assert raised.value.retry_delay_s
        other = await waits(admission, "other")
        admission.drain()
        with pytest.raises(StageError, match="DRAINING"):
            await other
        assert admission.waiting == 0


async def test_who_goes_away_while_waiting_leaves_nothing():
    admission = house(1)
    async with asyncio.timeout(10):
        async with admission.place(Client("me")):
            other = await waits(admission, "other")
            other.cancel()
            await asyncio.wait({other})
            assert admission.waiting == 0
            given = await waits(admission, "third")
        # The place is given and its waiter cancelled before it could look.
        given.cancel()
        await asyncio.wait({given})
    assert admission.running == 0


async def test_a_client_that_stalls_loses_its_place_to_one_that_waits_and_keeps_it_else():
    admission = house(3)
    async with asyncio.timeout(30), AsyncExitStack() as places:
        stalling, stalling_later, reading = [await places.enter_async_context(admission.place(Client("me"))) for _ in range(3)]
        stalling.writing_since, stalling_later.writing_since = time.monotonic() - 2 * STALLED_S, time.monotonic() - STALLED_S
        await asyncio.sleep(0)
        assert not stalling.taken_back.done(), "nobody waits"
        other = await waits(admission, "other")
        await stalling.taken_back
        admission._take_back()
        assert not stalling_later.taken_back.done(), "the place that is ending is for the one who waits"
        assert not reading.taken_back.done()
        other.cancel()
        await asyncio.wait({other})


async def test_the_limit_is_asked_anew():
    limit = 1
    admission = Admission(lambda: limit, 1.0)
    async with admission.place(Client("me")):
        limit = 2
        async with admission.place(Client("me")):
            assert admission.running == 2


# Turns at reading large requests --------------------------------------------------------------------------------------------------------


class Line:
    """Callers that want a turn each, and the order in which they had it."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self.had: list[str] = []
        self.go = asyncio.Event()

    def want(self, host: str, name: str = "") -> asyncio.Task[None]:
        return asyncio.create_task(self._have(Client(host, name)))

    async def _have(self, client: Client) -> None:
        async with self._turns.turn(client):
            self.had.append(client.host)
            await self.go.wait()


async def settle() -> None:
    """Let every task come to where it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_clients_take_turns_however_much_each_of_them_wants():
    line = Line(Turns())
    tasks = [line.want(client) for client in ("a",) * 20 + ("b", "b", "c")]
    await settle()
    assert line.had == ["a"]
    line.go.set()
    await asyncio.gather(*tasks)
    assert line.had[:3] == ["a", "b", "c"] and line.had[3:6].count("b") == 1
    assert len(line.had) == 23


async def test_hosts_take_turns_however_many_keys_each_of_them_invents():
    line = Line(Turns())
    tasks = [line.want("a", f"key:{number}") for number in range(20)] + [line.want("b", "key:mine"), line.want("a"), line.want("b")]
    await settle()
    line.go.set()
    await asyncio.gather(*tasks)
    assert line.had[:4] in (["a", "b", "a", "b"], ["a", "b", "b", "a"]) and len(line.had) == 23


async def test_what_waits_is_bounded_and_one_client_leaves_room_for_others():
    line = Line(Turns())
    tasks = [line.want("greedy") for _ in range(MAX_LARGE)]
    await settle()
    other = line.want("other")
    await settle()
    refused = [task for task in tasks if task.done()]
    assert refused and not other.done()
    for task in refused:
        error = task.exception()
        assert isinstance(error, StageError) and (error.reason, bool(error.retry_delay_s)) == ("OVERLOADED", True)
    line.go.set()
    await asyncio.wait([*tasks, other])
    assert "other" in line.had and len(line.had) == MAX_LARGE - len(refused) + 1


@pytest.mark.parametrize("client", ["same", "other"])
async def test_a_wait_has_an_end(client: str):
    line = Line(Turns(limit_s=0.01))
    holding = line.want("same")
    await settle()
    with pytest.raises(StageError, match="OVERLOADED"):
        await line.want(client)
    line.go.set()
    await holding
    await line.want(client)
    assert line.had == ["same", client]


async def test_nothing_is_left_of_who_goes_away():
    line = Line(Turns())
    tasks = [line.want(client) for client in ("a", "a", "b", "b", "c")]
    await settle()
    for task in tasks[:4]:
        task.cancel()
    await asyncio.wait(tasks[:4])
    await settle()
    assert line.had == ["a", "c"]
    line.go.set()
    await asyncio.gather(*[line.want("a") for _ in range(3)], tasks[4])
    assert line.had == ["a", "c", "a", "a", "a"]


# Clients --------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClientCall:
    """The facts of a call, as the router asks gRPC for them."""

    address: str
    key: str = ""
    proof: str | bytes = ""
    host: str | bytes = ""

    def peer(self) -> str:
        return self.address

    def invocation_metadata(self) -> Metadata:
        given = {"x-api-key": self.key, GATEWAY_KEY: self.proof, GATEWAY_HOST: self.host}
        return Metadata(("other", "x"), *((name, value) for name, value in given.items() if value))


ONE, SAME_HOST, OTHER_HOST = "ipv4:10.0.0.1:1000", "ipv4:10.0.0.1:1001", "ipv4:10.0.0.2:1000"
OF_STACK = Token("s" * 32)
PROOF = OF_STACK.for_gateway().secret
UUID = "322e3fe2cf6c4976a0f411505a32621c"


def client_of(call: ClientCall) -> Client:
    """As a router finds it that has a token."""
    return Callers(OF_STACK.for_gateway()).client_of(call)


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (ClientCall(ONE), ClientCall(SAME_HOST), True),
        (ClientCall(ONE), ClientCall(OTHER_HOST), False),
        (ClientCall("ipv6:%5B::1%5D:1"), ClientCall("ipv6:%5B::1%5D:2"), True),
        (ClientCall("ipv6:%5B2001:db8:1:2::1%5D:1"), ClientCall("ipv6:%5B2001:db8:1:2:ffff::9%5D:1"), True),
        (ClientCall("ipv6:[2001:db8:1:2::1]:1"), ClientCall("ipv6:%5B2001:db8:1:2::2%5D:1"), True),
        (ClientCall("ipv6:%5B2001:db8:1:2::1%5D:1"), ClientCall("ipv6:%5B2001:db8:1:3::1%5D:1"), False),
        (ClientCall("ipv6:%5Bfe80::1%25eth0%5D:1"), ClientCall("ipv6:%5Bfe80::2%25eth0%5D:1"), True),
        (ClientCall("ipv6:%5B::ffff:10.0.0.1%5D:1"), ClientCall(ONE), True),
        (ClientCall("ipv6:%5B::ffff:10.0.0.1%5D:1"), ClientCall("ipv6:%5B::ffff:10.0.0.2%5D:1"), False),
        (ClientCall("unix:"), ClientCall("unix:"), True),
        (ClientCall(ONE, "a"), ClientCall(SAME_HOST, "a"), True),
        (ClientCall(ONE, "a"), ClientCall(OTHER_HOST, "a"), False),
        (ClientCall(ONE, "a"), ClientCall(ONE, "b"), False),
        (ClientCall(ONE, "a"), ClientCall(ONE), False),
        (ClientCall(ONE, "a", PROOF, "one"), ClientCall(OTHER_HOST, "a", PROOF, "one"), True),
        (ClientCall(ONE, "a", PROOF, "one"), ClientCall(ONE, "a", PROOF, "other"), False),
        (ClientCall(ONE, "a", PROOF, "10.0.0.1"), ClientCall(ONE, "a"), False),
    ],
)
def test_places_are_counted_by_host_and_there_by_key(first: ClientCall, second: ClientCall, same: bool):
    assert (client_of(first) == client_of(second)) == same


@pytest.mark.parametrize("callers", [Callers(OF_STACK.for_gateway()), Callers()], ids=["with a token", "without"])
@pytest.mark.parametrize("host", ["elsewhere", "10.0.0.9", b"\xff", "gateway:one", "x" * 4000])
@pytest.mark.parametrize("proof", ["", "guessed" * 4, OF_STACK.secret, PROOF[:-1], PROOF.upper(), PROOF.encode() + b"\xff", "\u20ac" * 16])
def test_a_host_that_is_named_without_proof_counts_for_nothing(callers: Callers, host: str | bytes, proof: str | bytes) -> None:
    for key in ("", "a"):
        assert callers.client_of(ClientCall(ONE, key, proof, host)) == callers.client_of(ClientCall(ONE, key))


def test_a_router_without_a_token_believes_no_gateway() -> None:
    assert Callers().client_of(ClientCall(ONE, "a", PROOF, "one")) == Callers().client_of(ClientCall(ONE, "a"))


def test_the_key_itself_is_kept_nowhere():
    call = ClientCall(ONE, "secret")
    assert "secret" not in f"{client_of(call)} {request_of(call, UUID)}"


@pytest.mark.parametrize(
    ("first", "second", "request_id", "same"),
    [
        (ClientCall(ONE), ClientCall(ONE), "1", True),
        (ClientCall(ONE), ClientCall(SAME_HOST), "1", False),
        (ClientCall(ONE), ClientCall(OTHER_HOST), "1", False),
        (ClientCall(ONE), ClientCall(OTHER_HOST), UUID, True),
        (ClientCall(ONE, "a"), ClientCall(OTHER_HOST, "a"), "1", True),
        (ClientCall(ONE, "a"), ClientCall(ONE, "b"), "1", False),
        (ClientCall(ONE, "a"), ClientCall(ONE, "b"), UUID, False),
        (ClientCall(ONE, "a"), ClientCall(ONE), UUID, False),
    ],
)
def test_a_request_is_the_same_only_where_no_stranger_can_have_asked_it(first: ClientCall, second: ClientCall, request_id: str, same: bool):
    assert (request_of(first, request_id) == request_of(second, request_id)) == same


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (ClientCall(ONE), "10.0.0.1"),
        (ClientCall("ipv6:%5B::ffff:10.0.0.1%5D:1"), "10.0.0.1"),
        (ClientCall("ipv6:%5B2001:db8:1:2:ffff::9%5D:1"), "2001:db8:1:2::/64"),
        (ClientCall("ipv6:%5B::1%5D:1"), "::/64"),
        (ClientCall("unix:"), "local"),
        (ClientCall(ONE, "secret"), "key:2bb80d537b1da3e3"),
    ],
)
def test_logs_show_a_host_a_network_or_the_beginning_of_a_digest(call: ClientCall, expected: str) -> None:
    assert client_text(client_of(call)) == expected


def test_a_name_is_the_same_for_a_client_and_for_nobody_else() -> None:
    calls = (ClientCall(ONE), ClientCall(SAME_HOST), ClientCall(OTHER_HOST), ClientCall(ONE, "key"), ClientCall(ONE, "other"))
    one, same, other_host, key, other_key = (name_of(client_of(call)) for call in calls)
    assert one == same and len({one, other_host, key, other_key}) == 4
    assert len(one) == 33 and "10.0.0.1" not in one
    assert key.partition("/")[0] == one.partition("/")[0], "the host is the same"


def test_a_scope_is_that_of_a_key_and_all_without_one_share_theirs() -> None:
    one, other = (scope_of(client_of(ClientCall(ONE, key))) for key in ("a", "b"))
    assert one == scope_of(client_of(ClientCall(OTHER_HOST, "a"))) != other
    assert one and other and one != "a"
    assert (
        scope_of(client_of(ClientCall(ONE)))
        == scope_of(client_of(ClientCall(OTHER_HOST)))
        == scope_of(client_of(ClientCall("unix:")))
        == ""
    )


def test_whoever_knows_an_address_does_not_know_its_name() -> None:
    """It is another one in another process."""
    program = "from omnistage.router.callers import Client, name_of; print(name_of(Client('10.0.0.1')))"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    assert len(other) == 33 and other != name_of(client_of(ClientCall(ONE)))


# The gate -------------------------------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("method", "message", "code"),
    [
        (CHECK, health_pb2.HealthCheckRequest(service="none").SerializeToString(), grpc.StatusCode.NOT_FOUND),
        ("/none/None", b"", grpc.StatusCode.UNIMPLEMENTED),
        (CHECK, b"\xff\xff\xff\xff", grpc.StatusCode.INVALID_ARGUMENT),
    ],
    ids=["an error", "no method", "bytes that are no request"],
)
async def test_errors_pass_and_bytes_that_are_no_request_are_refused_as_that(
    channel: grpc.aio.Channel, method: str, message: bytes, code: grpc.StatusCode
):
    call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call(message, timeout=30)
    assert raised.value.code() == code
    if code == grpc.StatusCode.INVALID_ARGUMENT:
        told = refusal(raised.value)
        assert (told.reason, told.fields) == ("BAD_REQUEST", ["request"])


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
