"""Streams files that are too large for a request: the request names a port for each, and the pieces follow while it is answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from omnistage.client.errors import DETAILS_KEY, DOMAIN, BadRequestError
from omnistage.v1 import chunk_pb2, omni_pb2, stage_pb2

MIN_BYTES = 16 << 20
"""A medium of more bytes is streamed; others are put into the request."""

PORTS = tuple(f"media{number}" for number in range(8))
"""The input ports for streamed media, which every model has that takes encoded media piece by piece."""

PIECE_BYTES = 256 << 10

ConverseCall = grpc.aio.StreamStreamCall[omni_pb2.ConverseRequest, omni_pb2.ConverseResponse]


@dataclass(frozen=True, slots=True)
class Upload:
    """A medium to be streamed. source: the path of its file, or its bytes. size: in bytes, at the time of the check. use_audio: as in
    `Video`. field: the caller's name for it."""

    source: Path | bytes
    size: int
    media_type: str
    use_audio: bool
    field: str

    def part(self, port: str) -> stage_pb2.Part:
        """The part of a message that stands for the medium."""
        return stage_pb2.Part(port=port, media_type=self.media_type, use_audio=self.use_audio, total_bytes=self.size)


Uploads = Mapping[str, Upload]
"""Media by port."""


class Conversing:
    """A call of `Converse` for one request, which streams the media while the answer comes. Iterating gives the messages that `Generate`
    would give. Always call `cancel` at the end."""

    def __init__(self, call: ConverseCall, request: omni_pb2.GenerateRequest, uploads: Uploads) -> None:
        self.call = call
        self._request = request
        self._files = [_File(port, upload) for port, upload in uploads.items()]
        self._may_go_on = asyncio.Event()  # for the task that sends: a file may send more, or the answer is whole
        self._over = False
        self._sending: asyncio.Task[None] | None = None

    async def __aiter__(self) -> AsyncIterator[omni_pb2.GenerateResponse]:
        """The messages of the answer. Raises AioRpcError, also for a turn that failed; BadRequestError for a file that cannot be read
        any more."""
        await self._write(omni_pb2.ConverseRequest(turn=self._request))
        sending = self._sending = asyncio.create_task(self._send_all())
        sending.add_done_callback(_look_at_error)
        while True:
            reading = asyncio.ensure_future(self.call.read())
            if not sending.done():
                await asyncio.wait({reading, sending}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done() and not reading.done():
                sending.result()  # Raises the error of a file; otherwise everything is sent.
            message = await reading
            if not isinstance(message, omni_pb2.ConverseResponse):
                return  # gRPC's mark for the end of the call.
            match message.WhichOneof("event"):
                case "credit":
                    self._grant(message.credit)
                case "turn_failed":
                    raise _error(message.turn_failed)
                case None:
                    continue
                case name:
                    event = omni_pb2.GenerateResponse()
                    getattr(event, name).CopyFrom(getattr(message, name))
                    if name == "usage":
                        await self._leave(sending)
                    yield event

    def cancel(self) -> None:
        """End the call and close the files. Nothing else cancels the task that sends: gRPC ends a call whose write is cancelled."""
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None  # The task refers to this object and the files: a reference back would be a cycle.
        self.call.cancel()

    def _grant(self, credit: stage_pb2.Credit) -> None:
        """Note how many chunks the file of this port may send in all, and wake the task that sends."""
        for file in self._files:
            if file.port == credit.port:
                file.room = max(file.room, credit.total)
        self._may_go_on.set()

    async def _leave(self, sending: asyncio.Task[None]) -> None:
        """Stop sending and close our side of the call, because the answer is whole and the rest of the files is not needed."""
        self._over = True
        self._may_go_on.set()
        await asyncio.wait({sending})
        with suppress(grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError):
            await self.call.done_writing()

    async def _send_all(self) -> None:
        """Send a piece of each file in turn, of no file more than the router allows, and close the files."""
        try:
            while (waiting := [file for file in self._files if not file.is_ended]) and not self._over:
                ready = [file for file in waiting if file.seq < file.room]
                for file in ready:
                    chunk = await asyncio.to_thread(file.next_chunk)
                    if self._over:
                        return
                    await self._write(omni_pb2.ConverseRequest(chunk=chunk))
                if not ready:
                    self._may_go_on.clear()
                    await self._may_go_on.wait()
        finally:
            for file in self._files:
                file.close()

    async def _write(self, message: omni_pb2.ConverseRequest) -> None:
        """Write a message. If the call is over, this raises nothing: the reader of the call gets the error."""
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self.call.write(message)


class _File:
    """Reads one medium while it is sent. port: its port. seq: chunks sent so far. room: chunks that may be sent in all."""

    def __init__(self, port: str, upload: Upload) -> None:
        self._upload = upload
        self._open: BinaryIO | None = None
        self._at = 0  # bytes that were read
        self.port = port
        self.seq = 0
        self.room = 0
        self.is_ended = False  # whether the last chunk was read

    def next_chunk(self) -> chunk_pb2.Chunk:
        """Read the next chunk. Blocks. Raises BadRequestError."""
        data = self._read(min(PIECE_BYTES, self._upload.size - self._at))
        self.is_ended = self._at + len(data) == self._upload.size
        media = chunk_pb2.MediaChunk(data=data)
        chunk = chunk_pb2.Chunk(port=self.port, seq=self.seq, first=self._at, count=len(data), last=self.is_ended, media=media)
        self.seq += 1
        self._at += len(data)
        return chunk

    def close(self) -> None:
        if self._open is not None:
            self._open.close()

    def _read(self, size: int) -> bytes:
        """The next `size` bytes of the medium. Raises BadRequestError if the file cannot be read, or has become shorter."""
        source = self._upload.source
        if isinstance(source, bytes):
            return source[self._at : self._at + size]
        try:
            if self._open is None:
                self._open = source.open("rb")
            data = self._open.read(size)
        except OSError as error:
            raise BadRequestError.of(self._upload.field, f"cannot read {source}: {error.strerror or error}") from error
        if len(data) < size:
            raise BadRequestError.of(self._upload.field, f"{source} got shorter while it was sent")
        return data


def _look_at_error(task: asyncio.Task[None]) -> None:
    """Read the task's error, because asyncio logs an error that nobody has read."""
    if not task.cancelled():
        task.exception()


def _error(failed: omni_pb2.TurnFailed) -> grpc.aio.AioRpcError:
    """The gRPC error that a failed turn would have raised as a call of its own: with the same code, text and details."""
    code = next((code for code in grpc.StatusCode if code.value[0] == failed.code), grpc.StatusCode.UNKNOWN)
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=failed.reason, domain=DOMAIN, metadata=failed.metadata)]
    if failed.HasField("retry_delay"):
        details.append(error_details_pb2.RetryInfo(retry_delay=failed.retry_delay))
    if "field" in failed.metadata:
        violation = error_details_pb2.BadRequest.FieldViolation(field=failed.metadata["field"], description=failed.message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    status = status_pb2.Status(code=code.value[0], message=failed.message)
    for detail in details:
        status.details.add().Pack(detail)
    trailing = grpc.aio.Metadata((DETAILS_KEY, status.SerializeToString()))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, failed.message)
