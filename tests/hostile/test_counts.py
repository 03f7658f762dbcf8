"""Requests of little bytes and millions of elements: refused by name before they are built, at a router and a stage of their own process.

The kernel says how much memory the process needs at most; other clients are answered meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress

import grpc
import grpc.aio
import pytest

from helpers import lengths, wire
from helpers.ask import ask, refusal, request
from helpers.memory import Peak
from helpers.mistreated import RUN
from helpers.run import open_of
from helpers.servers import CLIENT_OPTIONS, ServerProcesses, all_free, omni_stub, stack, stage_stub
from omnistage.v1 import omni_pb2, omni_pb2_grpc, stage_pb2
from omnistage.wire.limits import MAX_FIELDS, TEXT_REQUEST_BYTES

GENERATE = "/omnistage.v1.OmniService/Generate"
CONVERSE = "/omnistage.v1.OmniService/Converse"
MAX_GROWTH = 160 << 20
"""Bytes that a server may need for one request of a few MiB, beside others: its buffers, but not millions of objects, which are 0.9 GB."""

SLOW_OR_BAD = {"BAD_REQUEST", "OVERLOADED"}
"""A busy machine may not come to all of many large requests in their time."""

ROUTER_PATHS = wire.repeated(wire.root_of(omni_pb2.GenerateRequest))
CONVERSE_PATHS = wire.repeated(wire.root_of(omni_pb2.ConverseRequest))
STAGE_PATHS = wire.repeated(wire.root_of(stage_pb2.RunRequest))


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcesses]:
    with stack(tmp_path_factory.mktemp("counts")) as running:
        yield running


AT_ROUTER, AT_STAGE = ({str(path): path for path in paths} for paths in (ROUTER_PATHS, STAGE_PATHS))
DRAWN = 5
"""Fields of each in the short form."""


def millions(path: wire.Path, most_bytes: int) -> bytes:
    """As many elements as fit, ten million at most."""
    content = max(len(path.times(1000)) - len(path.times(999)), 1)
    data = path.times(min(10_000_000, (most_bytes - 4096) // max(content, wire.width_of(path.field))))
    assert len(data) <= most_bytes
    return data


LARGE = [*[option for option in CLIENT_OPTIONS if "message_length" not in option[0]], ("grpc.max_send_message_length", 1 << 28)]


async def asked(address: str, data: bytes, key: str = "") -> grpc.aio.AioRpcError:
    """How Generate ends with these bytes for a request of a client with this API key; it must not end well."""
    async with grpc.aio.insecure_channel(address, options=LARGE) as channel:
        generate: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(GENERATE)
        try:
            await generate(data, timeout=60, metadata=[("x-api-key", key)] if key else None).read()
        except grpc.aio.AioRpcError as error:
            return error
    raise AssertionError("it ended well")


async def streamed(address: str, method: str, data: bytes) -> tuple[grpc.StatusCode, str]:
    """How a stream ends whose first message are these bytes. Its other end may have ended it before all of them are written."""
    async with grpc.aio.insecure_channel(address, options=LARGE) as channel:
        stream: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(method)
        call = stream(timeout=60)
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.InternalError):
            await call.write(data)
            await call.done_writing()
        with suppress(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass
        return await call.code(), await call.details() or ""


class ToyClient:
    """Another client, which asks one toy question after the other; each answer must be whole."""

    def __init__(self, stub: omni_pb2_grpc.OmniServiceAsyncStub) -> None:
        self._stub = stub
        self._answers = 0
        self._answered = asyncio.Event()

    async def go_on(self) -> None:
        while True:
            (await ask(self._stub, request("beside", self._answers))).check_toy(self._answers, "beside")
            self._answers += 1
            self._answered.set()

    async def is_answered(self, times: int) -> None:
        until = self._answers + times
        while self._answers < until:
            self._answered.clear()
            await self._answered.wait()


@asynccontextmanager
async def beside(address: str) -> AsyncIterator[ToyClient]:
    """It asks as long as the block runs."""
    async with omni_stub(address) as stub:
        other = ToyClient(stub)
        asking = asyncio.create_task(other.go_on())
        try:
            async with asyncio.timeout(60):
                yield other
        finally:
            asking.cancel()
            await asyncio.wait({asking})
            assert asking.cancelled(), asking.exception()


@lengths.some_or_all("name", AT_ROUTER, DRAWN)
async def test_millions_of_one_field_at_a_router(standing: ServerProcesses, name: str):
    path = AT_ROUTER[lengths.draw_of(name, AT_ROUTER, DRAWN, "router")]
    assert standing.router is not None
    async with beside(standing.address) as other:
        await other.is_answered(1)
        peak = Peak(standing.router.pid)
        told = refusal(await asked(standing.address, millions(path, TEXT_REQUEST_BYTES)))
        assert told.reason == "BAD_REQUEST" and str(path).endswith(told.fields[0]), told
        assert peak.growth < MAX_GROWTH
        await other.is_answered(1)


async def test_millions_of_one_field_in_a_conversation(standing: ServerProcesses):
    """The limit holds for a turn as for a request, and for a chunk, which comes before there is a turn."""
    assert standing.router is not None
    peak = Peak(standing.router.pid)
    for path in [*CONVERSE_PATHS[:4], *(path for path in CONVERSE_PATHS if str(path) in ("chunk.codes.codes", "chunk.tensor.shape"))]:
        code, details = await streamed(standing.address, CONVERSE, millions(path, TEXT_REQUEST_BYTES))
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert path.field.name in details and "at most" in details
    assert peak.growth < MAX_GROWTH


@lengths.some_or_all("name", AT_STAGE, DRAWN)
async def test_millions_of_one_field_at_a_stage(standing: ServerProcesses, name: str):
    """As the first message of a session, which is refused for its count and not for its place."""
    path = AT_STAGE[lengths.draw_of(name, AT_STAGE, DRAWN, "stage")]
    stage = standing.stages["thinker"]
    async with beside(standing.address) as other:
        await other.is_answered(1)
        peak = Peak(stage.pid)
        code, details = await streamed(stage.address, RUN, millions(path, 20 << 20))
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert path.field.name in details and "at most" in details
        assert peak.growth < MAX_GROWTH
        await other.is_answered(1)


@pytest.mark.parametrize("name", ["release.slots", "chunk.tensor.shape", "chunk.codes.codes", "chunk.text.token_ids"])
async def test_millions_of_one_field_in_a_session(standing: ServerProcesses, name: str):
    """After a good Open it is the bug of a sender."""
    stage = standing.stages["talker"]
    path = next(path for path in STAGE_PATHS if str(path) == name)
    async with stage_stub(stage.address) as stub, grpc.aio.insecure_channel(stage.address, options=CLIENT_OPTIONS) as channel:
        opening = open_of(await stub.Describe(stage_pb2.DescribeRequest(), timeout=10))
        run: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(RUN)
        call = run(timeout=60)
        await call.write(stage_pb2.RunRequest(open=opening).SerializeToString())
        await call.write(millions(path, 20 << 20))
        heard = [
            stage_pb2.RunResponse.FromString(message) for message in [await call.read(), await call.read()] if isinstance(message, bytes)
        ]
        await call.done_writing()
    assert [message.WhichOneof("event") for message in heard] == ["opened", "ended"]
    assert heard[-1].ended.reason == "PROTOCOL" and name in heard[-1].ended.message
    await all_free([stage.address])


async def test_many_such_requests_at_once_leave_room_for_others(standing: ServerProcesses):
    """The worst that is let through to the walk: as many fields as it may look at, from eight clients at once."""
    assert standing.router is not None
    data = wire.field(99, b"") * ((TEXT_REQUEST_BYTES - 64) // 3)
    async with beside(standing.address) as other:
        await other.is_answered(1)
        peak = Peak(standing.router.pid)
        errors: Sequence[grpc.aio.AioRpcError] = await asyncio.gather(*[asked(standing.address, data) for _ in range(8)])
        assert "BAD_REQUEST" in (reasons := {refusal(error).reason for error in errors}) and reasons <= SLOW_OR_BAD
        assert peak.growth < 8 * 4 * TEXT_REQUEST_BYTES
        await other.is_answered(1)


@lengths.long_form(
    "hostile/test_counts.py::test_many_such_requests_at_once_leave_room_for_others",
    unkept="The request of another client is read before most of a flood.",
)
async def test_large_requests_of_one_client_are_not_all_read_before_that_of_another(standing: ServerProcesses):
    """The thread that reads them takes them in turns: of the flood, most is still to be read when the other one is answered."""
    data = wire.field(99, b"") * (MAX_FIELDS + 1)
    turns = [stage_pb2.Message(role="user", parts=[stage_pb2.Part(text="a"), stage_pb2.Part(text="b")]) for _ in range(1000)]
    async with omni_stub(standing.address) as stub:
        flood = [asyncio.create_task(asked(standing.address, data, "flood")) for _ in range(20)]
        await asyncio.wait(flood, return_when=asyncio.FIRST_COMPLETED)
        answer = await ask(stub, request(seed=3, outputs=["text"], thinker={"messages": turns}))
        read = sum(each.done() for each in flood)
        errors = await asyncio.gather(*flood)
    assert answer.usage is not None and answer.text()
    assert "BAD_REQUEST" in (reasons := {refusal(error).reason for error in errors}) and reasons <= SLOW_OR_BAD
    assert read < 15


async def test_a_request_for_text_is_read_up_to_eight_mebibytes(standing: ServerProcesses):
    error = await asked(standing.address, wire.field(99, bytes(TEXT_REQUEST_BYTES)))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    error = await asked(standing.address, wire.field(99, bytes(TEXT_REQUEST_BYTES - 64)))
    assert refusal(error).fields == ["thinker.messages"]
