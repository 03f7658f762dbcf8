"""A link of a test's own, and servers for it that do what they like instead of what the contract says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import numpy as np
from numpy.typing import NDArray

from helpers.ports import take_address
from helpers.run import PLENTY, params
from helpers.servers import Local, local_stage, toy_logic
from omnistage.link.link import Link
from omnistage.link.liveness import TICK_S, Channels
from omnistage.link.search import FixedRoute, Route
from omnistage.v1 import chunk_pb2, stage_pb2
from omnistage.wire.channel import Credentials, server_options
from omnistage.wire.proto_values import duration

TIMEOUT_S = 30.0

Context = grpc.aio.ServicerContext[bytes, bytes]
Behaviour = Callable[[stage_pb2.Open, Context], Awaitable[None]]
"""The behaviour of a bare peer in a Run, after it has read Open."""


def opening(kind: str = "talker", credits: int | Mapping[str, int] = PLENTY, **fields: object) -> stage_pb2.Open:
    """An Open for a toy stage, without route. credits: for each of its ports, or by port."""
    outputs = {"thinker": ["text", "hidden"], "talker": ["codes"], "code2wav": ["audio"]}[kind]
    given = credits if isinstance(credits, Mapping) else dict.fromkeys(outputs, credits)
    values = {
        "session_id": "s",
        "model": f"toy-{kind}",
        "params": params(kind),
        "credits": [stage_pb2.Credit(port=port, total=total) for port, total in given.items()],
        **fields,
    }
    return stage_pb2.Open(**values)  # type: ignore[arg-type]


def route_to(*addresses: str, kind: str = "talker", **fields: object) -> FixedRoute:
    """fields: of FixedRoute."""
    return FixedRoute(stage_pb2.StageKind.Value(f"STAGE_KIND_{kind.upper()}"), addresses, **fields)  # type: ignore[arg-type]


@asynccontextmanager
async def link_by(route: Route, request: stage_pb2.Open, *, within_s: float = TIMEOUT_S, **options: object) -> AsyncIterator[Link]:
    """A link with channels of its own. options: of Link."""
    async with Channels(Credentials()) as channels:
        link = Link(channels, route, request, deadline=time.monotonic() + within_s, **options)  # type: ignore[arg-type]
        try:
            yield link
        finally:
            await link.close()


async def hear(link: Link) -> list[stage_pb2.RunResponse]:
    """All events to the end, chunks one by one."""
    async with asyncio.timeout(TIMEOUT_S), aclosing(link.events()) as events:
        return [single async for event in events for single in singly(event)]


def singly(event: stage_pb2.RunResponse) -> list[stage_pb2.RunResponse]:
    if not event.HasField("chunks"):
        return [event]
    return [stage_pb2.RunResponse(chunk=chunk) for chunk in event.chunks.chunks]


def chunks_of(events: Sequence[stage_pb2.RunResponse], port: str) -> list[chunk_pb2.Chunk]:
    """Chunks of a port, which must be numbered without gap and repeat."""
    chunks = [event.chunk for event in events if event.HasField("chunk") and event.chunk.port == port]
    first = 0
    for seq, chunk in enumerate(chunks):
        assert (chunk.seq, chunk.first) == (seq, first), port
        first += chunk.count
    return chunks


def codes_of(events: Sequence[stage_pb2.RunResponse]) -> list[int]:
    return [code for chunk in chunks_of(events, "codes") for code in chunk.codes.codes]


def samples_of(events: Sequence[stage_pb2.RunResponse]) -> NDArray[np.int16]:
    return np.frombuffer(b"".join(chunk.audio.data for chunk in chunks_of(events, "audio")), "<i2")


def failovers_of(events: Sequence[stage_pb2.RunResponse]) -> list[stage_pb2.Failover]:
    return [event.failover for event in events if event.HasField("failover")]


class StoppableReplica:
    """A stage in this loop that can be stopped in the middle of its sessions, as if it were killed."""

    def __init__(self, server: Local, stack: AsyncExitStack) -> None:
        self.address = server.address
        self.server = server
        self._stack = stack

    async def kill(self) -> None:
        await self._stack.aclose()


@asynccontextmanager
async def replicas(
    kind: str, count: int = 2, options: Mapping[str, object] | None = None, **settings: Any
) -> AsyncIterator[list[StoppableReplica]]:
    async with AsyncExitStack() as everything:
        running = []
        for _ in range(count):
            stack = AsyncExitStack()
            server = await stack.enter_async_context(local_stage(toy_logic(kind, options), **settings))
            everything.push_async_callback(stack.aclose)
            running.append(StoppableReplica(server, stack))
        yield running


class LinkListener:
    def __init__(self, link: Link) -> None:
        self._events = link.events()
        self.heard: list[stage_pb2.RunResponse] = []

    async def until(self, condition: Callable[[Sequence[stage_pb2.RunResponse]], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition(self.heard):
                self.heard += singly(await anext(self._events))

    async def chunks(self, port: str, count: int) -> None:
        await self.until(lambda events: len(chunks_of(events, port)) >= count)

    async def finish(self) -> list[stage_pb2.RunResponse]:
        async with asyncio.timeout(30):
            async for event in self._events:
                self.heard += singly(event)
        return self.heard


def chunk(seq: int, *, last: bool = False) -> stage_pb2.RunResponse:
    """A frame of codes, one to a chunk."""
    codes = chunk_pb2.CodeChunk(codes=[seq], codebook_count=1)
    return stage_pb2.RunResponse(chunk=chunk_pb2.Chunk(port="codes", seq=seq, first=seq, count=1, last=last, codes=codes))


ENDED = stage_pb2.RunResponse(ended=stage_pb2.Ended())

Beats = Callable[[bytes, Context], AsyncIterator[bytes]]


async def no_beat(request: bytes, context: Context) -> AsyncIterator[bytes]:
    """A Watch as a stage has it whose event loop is blocked."""
    await asyncio.Event().wait()
    yield b""


async def steady_beat(request: bytes, context: Context) -> AsyncIterator[bytes]:
    """A Watch as a stage has it that is well."""
    while True:
        yield stage_pb2.WatchResponse(period=duration(TICK_S)).SerializeToString()
        await asyncio.sleep(TICK_S)


@asynccontextmanager
async def bare_peer(
    behave: Behaviour, beats: Beats | None = None, description: stage_pb2.DescribeResponse | None = None
) -> AsyncIterator[str]:
    """A server whose `Run` does what it likes, in bytes. beats: its Watch; None: it has none. description: its Describe, the same."""

    async def run(requests: object, context: Context) -> None:
        message = await context.read()
        request = stage_pb2.RunRequest.FromString(message) if isinstance(message, bytes) else stage_pb2.RunRequest()
        await behave(request.open, context)

    async def describe(request: bytes, context: Context) -> bytes:
        return (description or stage_pb2.DescribeResponse()).SerializeToString()

    server = grpc.aio.server(options=server_options())
    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {"Run": grpc.stream_stream_rpc_method_handler(run)}
    if beats is not None:
        methods["Watch"] = grpc.unary_stream_rpc_method_handler(beats)
    if description is not None:
        methods["Describe"] = grpc.unary_unary_rpc_method_handler(describe)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("omnistage.v1.StageService", methods),))
    address = take_address()
    server.add_insecure_port(address)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(0)


async def say(context: Context, *messages: stage_pb2.RunResponse | bytes) -> None:
    for message in messages:
        await context.write(message if isinstance(message, bytes) else message.SerializeToString())


def says(*messages: stage_pb2.RunResponse | bytes) -> Behaviour:
    """Says so much, and ends the call without an error."""

    async def behave(request: stage_pb2.Open, context: Context) -> None:
        await say(context, *messages)

    return behave


async def listen(context: Context) -> None:
    """Read up to the half-close."""
    while await context.read() is not grpc.aio.EOF:  # type: ignore[comparison-overlap]
        pass


async def heard(context: Context) -> stage_pb2.RunRequest:
    """The caller's next message, which must be there."""
    message = await context.read()
    assert isinstance(message, bytes), "the caller half-closed"
    return stage_pb2.RunRequest.FromString(message)


async def abort(request: stage_pb2.Open, context: Context) -> None:
    """As a broken connection looks at times."""
    await context.abort(grpc.StatusCode.INTERNAL, "Internal error from Core")


async def silence(request: stage_pb2.Open, context: Context) -> None:
    await listen(context)
