"""A bare caller of `OmniService.Converse`: turns, files that are streamed in pieces within the credit that is given, and what it heard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

import grpc
import grpc.aio
import numpy as np
from numpy.typing import NDArray

from helpers.ask import TIMEOUT_S, WholeAnswer
from helpers.disturbed import DisturbanceStep, DisturbanceSteps
from omnistage.models.toy import formulas
from omnistage.v1 import chunk_pb2, omni_pb2, omni_pb2_grpc, stage_pb2
from omnistage.wire.calls import look_at_error

PIECE = 256 << 10
HOP = 960
"""Samples of a piece of live sound."""

Pieces = Iterable[chunk_pb2.Chunk]
Pause = Callable[[], Awaitable[object]]


class TurnFailed(Exception):
    """The error of a turn after which the conversation goes on."""

    def __init__(self, failed: omni_pb2.TurnFailed) -> None:
        super().__init__(f"{failed.reason}: {failed.message}")
        self.failed = failed
        self.reason = failed.reason


class ConverseStream:
    """One call. Use `turn` for whole turns; `send` and `read` for anything else."""

    def __init__(self, stub: omni_pb2_grpc.OmniServiceAsyncStub, timeout_s: float = TIMEOUT_S, *, key: str = "") -> None:
        """key: of the client."""
        metadata = (("x-api-key", key),) * bool(key)
        self.call: grpc.aio.StreamStreamCall[omni_pb2.ConverseRequest, omni_pb2.ConverseResponse] = stub.Converse(
            timeout=timeout_s, metadata=metadata
        )
        self.room: dict[str, int] = {}
        self._grown = asyncio.Event()
        self._writing = asyncio.Lock()

    async def send(self, **event: object) -> None:
        async with self._writing:
            await self.call.write(omni_pb2.ConverseRequest(**event))  # type: ignore[arg-type]

    async def read(self) -> omni_pb2.ConverseResponse:
        """The next message; credit is also noted down. Raises AioRpcError for a call that failed."""
        message = await self.call.read()
        assert isinstance(message, omni_pb2.ConverseResponse), f"the call is over: {await self.call.code()} {await self.call.details()}"
        if message.HasField("credit"):
            assert message.credit.total > self.room.get(message.credit.port, 0)
            self.room[message.credit.port] = message.credit.total
            self._grown.set()
        return message

    async def turn(
        self,
        asked: omni_pb2.GenerateRequest,
        media: Mapping[str, Pieces] | None = None,
        pause: Pause | None = None,
        *steps: DisturbanceStep,
    ) -> WholeAnswer:
        """Ask, stream the media, and read the whole answer, each step taken in its turn. pause: before every chunk. Raises TurnFailed, and
        AssertionError if the answer ends before the last step."""
        self.room.clear()
        await self.send(turn=asked)
        async with self.streaming(media or {}, pause):
            return await self.answer(*steps)

    @asynccontextmanager
    async def streaming(self, media: Mapping[str, Pieces], pause: Pause | None = None) -> AsyncIterator[None]:
        """Stream all ports at once meanwhile."""
        tasks = [asyncio.create_task(self._stream(port, pieces, pause)) for port, pieces in media.items()]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            for task in tasks:
                with suppress(asyncio.CancelledError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    await task

    async def answer(self, *steps: DisturbanceStep) -> WholeAnswer:
        """The rest of a turn, each step taken in its turn. Raises TurnFailed, and AssertionError if it ends before the last step."""
        answer, planned = WholeAnswer(), DisturbanceSteps(*steps)
        async for event in self.events():
            answer.take(event)
            await planned.take(answer)
        planned.check_taken(answer)
        return answer

    async def events(self) -> AsyncIterator[omni_pb2.GenerateResponse]:
        """The rest of a turn as Generate would tell it, up to its Usage. Raises TurnFailed."""
        over = False
        while not over:
            message = await self.read()
            name = str(message.WhichOneof("event"))
            if name == "turn_failed":
                raise TurnFailed(message.turn_failed)
            if name != "credit":
                event = omni_pb2.GenerateResponse()
                getattr(event, name).CopyFrom(getattr(message, name))
                over = name == "usage"
                yield event

    async def end(self) -> grpc.StatusCode:
        """Half-close, and the status; nothing more may come."""
        await self.call.done_writing()
        assert await self.call.read() is grpc.aio.EOF
        return await self.call.code()

    async def failure(self) -> grpc.aio.AioRpcError:
        """How the call failed: a write to one that is over says no more than that."""
        call = self.call
        return grpc.aio.AioRpcError(await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details())

    async def _stream(self, port: str, pieces: Pieces, pause: Pause | None) -> None:
        for chunk in pieces:
            if pause is not None:
                await pause()
            while chunk.seq >= self.room.get(port, 0):
                self._grown.clear()
                await self._grown.wait()
            sending = asyncio.create_task(self.send(chunk=chunk))
            sending.add_done_callback(look_at_error)
            await asyncio.shield(sending)  # To cancel a write is to cancel the call.


def file_chunks(port: str, data: bytes, sizes: Sequence[int] = (PIECE,)) -> Pieces:
    """A file in pieces of these sizes, again and again; the end comes by itself."""
    at, seq = 0, 0
    while at < len(data):
        part = data[at : at + sizes[seq % len(sizes)]]
        yield chunk_pb2.Chunk(port=port, seq=seq, first=at, count=len(part), media=chunk_pb2.MediaChunk(data=part))
        at, seq = at + len(part), seq + 1
    yield chunk_pb2.Chunk(port=port, seq=seq, first=at, last=True)


def sound_chunks(port: str, sound: NDArray[np.int16], sizes: Sequence[int] = (HOP,)) -> Pieces:
    """Live sound of the toys' rate in pieces of these sizes, again and again."""
    at, seq = 0, 0
    while at < len(sound):
        part = sound[at : at + sizes[seq % len(sizes)]]
        audio = chunk_pb2.AudioChunk(
            data=part.astype("<i2").tobytes(),
            encoding=chunk_pb2.AUDIO_ENCODING_PCM16,
            sample_rate_hz=formulas.SAMPLE_RATE_HZ,
            channel_count=1,
        )
        yield chunk_pb2.Chunk(port=port, seq=seq, first=at, count=len(part), last=at + len(part) == len(sound), audio=audio)
        at, seq = at + len(part), seq + 1


def zeros(port: str, size: int) -> Pieces:
    """A file of so many zeros, of which only one piece is in memory."""
    piece = chunk_pb2.MediaChunk(data=bytes(PIECE))
    for seq in range(size // PIECE):
        last = (seq + 1) * PIECE == size
        yield chunk_pb2.Chunk(port=port, seq=seq, first=seq * PIECE, count=PIECE, last=last, media=piece)


def on_port(port: str, media_type: str = "", total_bytes: int = 0) -> stage_pb2.Part:
    return stage_pb2.Part(port=port, media_type=media_type, total_bytes=total_bytes)
