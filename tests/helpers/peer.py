"""A router that answers from memory, and a wire to it that can be cut: for what a client does when its connection breaks.

The answer is TEXT and SAMPLES whatever was asked; it goes on from any position, as a router does.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import numpy as np
from numpy.typing import NDArray

from omnistage.client import AsyncOmni
from omnistage.router.callers import API_KEY
from omnistage.router.front import GenerateContext
from omnistage.v1 import chunk_pb2, omni_pb2, omni_pb2_grpc
from omnistage.wire.channel import server_options
from omnistage.wire.errors import StageError, abort

WORDS = tuple(f"w{n} " for n in range(12))
TEXT = "".join(WORDS)
SAMPLES: NDArray[np.int16] = np.arange(36, dtype="<i2") * 100
STARTED = omni_pb2.Started(session_id="s", model="peer", seed=7, revisions=["r1", "r2"])
USAGE = omni_pb2.Usage(finish_reason=chunk_pb2.FINISH_REASON_STOP)

Events = Sequence[omni_pb2.GenerateResponse]


@dataclass(frozen=True)
class Bare:
    """End a call with a status that says nothing of ours, as gRPC itself and proxies do, after so many events."""

    code: grpc.StatusCode
    after: int = 0


@dataclass(frozen=True)
class Failing:
    events: Events
    error: StageError


Play = None | int | StageError | Events | Bare | Failing
"""The behaviour for one request: answer it whole; send so many events and then nothing more; refuse it; send exactly these events and then
nothing more; end it without a word; send these events and end with that error."""


def event(message: omni_pb2.Started | chunk_pb2.Chunk | omni_pb2.Usage) -> omni_pb2.GenerateResponse:
    match message:
        case omni_pb2.Started():
            return omni_pb2.GenerateResponse(started=message)
        case chunk_pb2.Chunk():
            return omni_pb2.GenerateResponse(chunk=message)
    return omni_pb2.GenerateResponse(usage=message)


def answer(request: omni_pb2.GenerateRequest) -> Iterator[omni_pb2.GenerateResponse]:
    """The (rest of the) answer: text and sound in turns, cut in other places when it goes on."""
    size = 3 if request.HasField("resume") else 2
    positions = {position.port: position for position in request.resume.positions}
    ports = [_pieces(port, positions.get(port), size) for port in ("text", "audio")]
    yield event(STARTED)
    while ports:
        for port in list(ports):
            chunk = next(port, None)
            if chunk is None:
                ports.remove(port)
            else:
                yield event(chunk)
    yield event(USAGE)


def _pieces(port: str, position: object, size: int) -> Iterator[chunk_pb2.Chunk]:
    seq, first, ended = (getattr(position, name, 0) for name in ("seq", "first", "ended"))
    total = len(WORDS) if port == "text" else len(SAMPLES)
    while not ended:
        count = min(size if port == "text" else 3 * size, total - first)
        ended = first + count == total
        chunk = chunk_pb2.Chunk(port=port, seq=seq, first=first, count=count, last=ended)
        if port == "text":
            chunk.text.text = "".join(WORDS[first : first + count])
            chunk.text.token_ids.extend(range(first, first + count))
            if ended:
                chunk.text.finish_reason = chunk_pb2.FINISH_REASON_STOP
        else:
            sound = chunk_pb2.AudioChunk(encoding=chunk_pb2.AUDIO_ENCODING_PCM16, sample_rate_hz=24000, channel_count=1)
            sound.data = SAMPLES[first : first + count].tobytes()
            chunk.audio.CopyFrom(sound)
        yield chunk
        seq, first = seq + 1, first + count


class PlayingPeer(omni_pb2_grpc.OmniServiceServicer):
    """Plays `plays`, one for each request, in order; further requests are answered whole."""

    def __init__(self, *plays: Play) -> None:
        self._plays = list(plays)
        self.requests: list[omni_pb2.GenerateRequest] = []
        self.left_s: list[float] = []
        """Time limit that each request came with."""
        self.keys: list[object] = []
        """API key that each request came with, or None."""
        self._news = asyncio.Condition()
        self.cancelled = asyncio.Event()
        """A request was given up by its client."""

    async def asked(self, count: int) -> None:
        """Return when so many requests have come."""
        async with asyncio.timeout(30), self._news:
            await self._news.wait_for(lambda: len(self.requests) >= count)

    async def Generate(self, request: omni_pb2.GenerateRequest, context: GenerateContext) -> AsyncIterator[omni_pb2.GenerateResponse]:
        self.requests.append(request)
        self.left_s.append(context.time_remaining() or 0.0)
        self.keys.append(dict(context.invocation_metadata() or ()).get("x-api-key"))
        async with self._news:
            self._news.notify_all()
        play = self._plays.pop(0) if self._plays else None
        if isinstance(play, StageError):
            await abort(context, play)
        if isinstance(play, Bare):
            for message in list(answer(request))[: play.after]:
                yield message
            await context.abort(play.code)
        if isinstance(play, Failing):
            for begun in play.events:
                yield begun
            await abort(context, play.error)
        events = play if isinstance(play, Sequence) else list(answer(request))
        for event in events[:play] if isinstance(play, int) else events:
            yield event
        if play is not None:
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()

    async def Converse(self, request_iterator: object, context: grpc.aio.ServicerContext[object, object]) -> None:  # type: ignore[override]
        await context.abort(grpc.StatusCode.UNIMPLEMENTED)

    async def ListModels(
        self, request: omni_pb2.ListModelsRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> omni_pb2.ListModelsResponse:
        """The one call of these that plays; it can only end bare."""
        play = self._plays[0] if self._plays else None
        if isinstance(play, Bare):
            self._plays.remove(play)
            await context.abort(play.code)
        return omni_pb2.ListModelsResponse()

    async def ListReplicas(self, request: omni_pb2.ListReplicasRequest, context: object) -> omni_pb2.ListReplicasResponse:
        return omni_pb2.ListReplicasResponse()


class Wire:
    """A TCP relay on a port of its own."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._socket: socket.socket | None = None
        self._relays: set[asyncio.Task[None]] = set()
        self._ends: set[asyncio.StreamWriter] = set()
        self.address = ""
        self.taken = 0
        """Connections, in all."""

    def connect(self) -> None:
        """Take connections, on the same port as before."""
        self._socket = socket.create_server(("127.0.0.1", int(self.address.rpartition(":")[2] or 0)))
        self._socket.setblocking(False)
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        asyncio.get_running_loop().add_reader(self._socket, self._accept, self._socket)

    def cut(self) -> None:
        """Break every connection; new ones are taken."""
        for relay in self._relays:
            relay.cancel()

    def mute(self) -> None:
        """Every connection stands, nothing gets through it any more, and nobody is told."""
        for end in self._ends:
            if isinstance(end.transport, asyncio.Transport):
                end.transport.pause_reading()

    async def disconnect(self) -> None:
        """Break every connection and take no new one."""
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None
        self.cut()
        if self._relays:
            await asyncio.wait(self._relays)

    def _accept(self, listening: socket.socket) -> None:
        connection, _ = listening.accept()
        self.taken += 1
        relay = asyncio.create_task(self._relay(connection))
        self._relays.add(relay)
        relay.add_done_callback(self._relays.discard)
        relay.add_done_callback(lambda _: connection.close())  # also of one that never began

    async def _relay(self, connection: socket.socket) -> None:
        ends: list[asyncio.StreamWriter] = []
        try:
            reader, writer = await asyncio.open_connection(sock=connection)
            ends.append(writer)
            there, back = await asyncio.open_connection(self._host, self._port)
            ends.append(back)
            self._ends.update(ends)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_pump(reader, back))
                tasks.create_task(_pump(there, writer))
        except* ConnectionError:
            pass
        finally:
            self._ends.difference_update(ends)
            for end in ends:
                end.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until either end is over; the other then is, too."""
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    raise ConnectionResetError


@asynccontextmanager
async def listening(peer: PlayingPeer) -> AsyncIterator[Wire]:
    server = grpc.aio.server(options=server_options(1 << 26))
    omni_pb2_grpc.add_OmniServiceServicer_to_server(peer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    wire = Wire(f"127.0.0.1:{port}")
    wire.connect()
    try:
        yield wire
    finally:
        await wire.disconnect()
        await server.stop(0)


class Doorkeeper(grpc.aio.ServerInterceptor):
    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        key = dict(details.invocation_metadata or ()).get(API_KEY)
        self.calls.append((details.method.rpartition("/")[2], key))
        return await continuation(details)


@asynccontextmanager
async def playing(*plays: Play, **options: Any) -> AsyncIterator[tuple[PlayingPeer, Wire, AsyncOmni]]:
    """The peer, the wire to it, and a client at the end of the wire. options: of the client."""
    peer = PlayingPeer(*plays)
    async with listening(peer) as wire, AsyncOmni(address=wire.address, **options) as omni:
        yield peer, wire, omni
