"""The chunks of a port: their numbers, the credit that limits how many of them may be sent, and several small ones in one message, which
means the same as one message for each chunk, and costs less."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from omnistage.v1 import chunk_pb2, omni_pb2, stage_pb2, tensor_pb2
from omnistage.wire.errors import StageError, protocol_error
from omnistage.wire.limits import MAX_BATCH

MessagePayload = (
    chunk_pb2.TextChunk
    | chunk_pb2.CodeChunk
    | chunk_pb2.AudioChunk
    | chunk_pb2.ImageChunk
    | chunk_pb2.VideoChunk
    | chunk_pb2.ProgressChunk
    | chunk_pb2.MediaChunk
    | chunk_pb2.AlignmentChunk
)

Payload = MessagePayload | NDArray[np.generic]
"""The content of a chunk. An array becomes a Tensor when the transport of the stream is known."""

Content = MessagePayload | list[tensor_pb2.Tensor] | None
"""The content of a chunk once the transport is known: a tensor is one message, or one message for each of its parts."""

_FIELDS = {
    type(getattr(chunk_pb2.Chunk(), field.name)): field.name for field in chunk_pb2.Chunk.DESCRIPTOR.oneofs_by_name["payload"].fields
}
"""The field of a chunk for each type of payload."""

_FLOATING = frozenset({tensor_pb2.ELEMENT_TYPE_FLOAT32, tensor_pb2.ELEMENT_TYPE_FLOAT16, tensor_pb2.ELEMENT_TYPE_BFLOAT16})


def converts(source: tensor_pb2.ElementType, target: tensor_pb2.ElementType) -> bool:
    """Whether a stage that wants rows of the element type `target` takes rows of the type `source`: it converts floating types."""
    return source == target or (source in _FLOATING and target in _FLOATING)


@dataclass(frozen=True, slots=True)
class Output:
    """One piece of one output port, before it has a number. count: items in it (see Chunk.count). payload: None only with count 0. last:
    the port ends with it. element_type: for an array whose type numpy does not have; see Sender.store."""

    port: str
    count: int
    payload: Payload | None
    last: bool = False
    element_type: tensor_pb2.ElementType | None = None


class PortWriter:
    """Makes the chunks of one port, numbered one after the other. seq: number of the next chunk. first: number of its first item."""

    def __init__(self, port: str, *, seq: int = 0, first: int = 0, is_ended: bool = False) -> None:
        """seq, first, is_ended: the position of the port, if it goes on from an earlier stream."""
        self.port = port
        self.seq = seq
        self.first = first
        self.is_ended = is_ended

    def chunks(self, count: int, content: Content, *, last: bool) -> list[chunk_pb2.Chunk]:
        """Return one chunk, or several for a tensor that travels inline in parts: all but the last part have count 0."""
        if self.is_ended:
            raise protocol_error(f"output after the last chunk of port {self.port!r}", port=self.port)
        if not isinstance(content, list):
            return [self._chunk(count, last, content)]
        *parts, last_part = content
        return [*(self._chunk(0, False, part) for part in parts), self._chunk(count, last, last_part)]

    def _chunk(self, count: int, last: bool, payload: MessagePayload | tensor_pb2.Tensor | None) -> chunk_pb2.Chunk:
        """Make the next chunk. count: items in it."""
        chunk = chunk_pb2.Chunk(port=self.port, seq=self.seq, first=self.first, count=count, last=last)
        if payload is not None:
            getattr(chunk, _FIELDS[type(payload)]).CopyFrom(payload)
        self.seq += 1
        self.first += count
        self.is_ended = last
        return chunk


class PortReader:
    """Checks that the chunks of one port come without gap or repeat, and within their credit. seq: number that the next chunk must have.
    first: number that its first item must have. granted: how many chunks may come in all."""

    def __init__(self, port: str, granted: int = 0, *, seq: int = 0, first: int = 0, is_ended: bool = False) -> None:
        """seq, first, is_ended: the position of the port, if it goes on from an earlier stream."""
        self.port = port
        self.seq = seq
        self.first = first
        self.is_ended = is_ended
        self.granted = granted

    def accept(self, chunk: chunk_pb2.Chunk) -> None:
        """Count a chunk. Raises PROTOCOL or CREDIT_EXCEEDED for a chunk that may not come now."""
        if self.is_ended:
            raise protocol_error(f"chunk after the last one of port {self.port!r}", port=self.port)
        if chunk.seq != self.seq or chunk.first != self.first:
            raise protocol_error(
                f"port {self.port!r}: got chunk {chunk.seq} at item {chunk.first}, expected chunk {self.seq} at item {self.first}",
                port=self.port,
            )
        if self.seq >= self.granted:
            raise StageError(
                "CREDIT_EXCEEDED", f"port {self.port!r}: {self.granted} chunks were allowed, this is one more", metadata={"port": self.port}
            )
        if chunk.WhichOneof("payload") is None and chunk.count:
            raise protocol_error(f"port {self.port!r}: {chunk.count} items without a payload", port=self.port)
        self.seq += 1
        self.first += chunk.count
        self.is_ended = chunk.last


class Allowance:
    """The credit that this end has for the ports of one stream, as total numbers of chunks, and a way to wait for more credit. Totals only
    grow; a lower total changes nothing."""

    def __init__(self) -> None:
        self._totals: dict[str, int] = {}
        self._grown = asyncio.Event()
        self._closed: tuple[str, str] | None = None  # reason and message of the error for those who wait

    def grant(self, port: str, total: int) -> None:
        if total > self._totals.get(port, 0):
            self._totals[port] = total
            self._grown.set()

    def total(self, port: str) -> int:
        return self._totals.get(port, 0)

    def close(self, reason: str, message: str) -> None:
        """Note that no more credit will come. From now on a `wait` for credit raises a StageError with this reason, a new error each time,
        because an error that is kept would keep the frames that it passed through."""
        self._closed = reason, message
        self._grown.set()

    async def wait(self, port: str, seq: int) -> None:
        """Return when chunk number `seq` of the port may be sent. Raises the error given to `close` if it never may."""
        while seq >= self._totals.get(port, 0):
            if self._closed is not None:
                raise StageError(*self._closed)
            self._grown.clear()
            await self._grown.wait()


MAX_BATCH_BYTES = 32 << 10
"""Largest number of bytes of the chunks that a sender puts into one message. In a larger message the bytes cost more than the message
itself, so fewer messages would save nothing."""

Message = stage_pb2.RunRequest | stage_pb2.RunResponse | omni_pb2.GenerateResponse
M = TypeVar("M", stage_pb2.RunRequest, stage_pb2.RunResponse, omni_pb2.GenerateResponse)


class Batch:
    """Chunks that go in one message: at most MAX_BATCH, and MAX_BATCH_BYTES together. The first chunk always fits, so a larger chunk
    travels by itself."""

    def __init__(self, *, together: bool) -> None:
        """together: whether the other end takes several chunks in one message; if not, a batch holds one chunk."""
        self._max_chunks = MAX_BATCH if together else 1
        self._chunks: list[chunk_pb2.Chunk] = []
        self._bytes = 0

    def add(self, *chunks: chunk_pb2.Chunk) -> bool:
        """Add all of these chunks or none of them. Return whether they were added."""
        size = sum(chunk.ByteSize() for chunk in chunks)
        if self._chunks and (len(self._chunks) + len(chunks) > self._max_chunks or self._bytes + size > MAX_BATCH_BYTES):
            return False
        self._chunks += chunks
        self._bytes += size
        return True

    def __len__(self) -> int:
        return len(self._chunks)

    def put_into(self, message: M) -> M:
        """Put the chunks into this empty message, and return it."""
        if len(self._chunks) == 1:
            message.chunk.CopyFrom(self._chunks[0])
        else:
            message.chunks.chunks.extend(self._chunks)
        return message


def batch_chunks(chunks: Iterable[chunk_pb2.Chunk], new: Callable[[], M], *, together: bool) -> Iterator[M]:
    """Yield messages with these chunks, as few messages as possible. new: makes an empty message. together: as in Batch."""
    batch = Batch(together=together)
    for chunk in chunks:
        if not batch.add(chunk):
            yield batch.put_into(new())
            batch = Batch(together=together)
            batch.add(chunk)
    if batch:
        yield batch.put_into(new())


def chunks_of(message: Message) -> Sequence[chunk_pb2.Chunk]:
    """Return the chunks of a message that has one, several or none. Raises PROTOCOL for too many."""
    match message.WhichOneof("event"):
        case "chunk":
            return (message.chunk,)
        case "chunks":
            chunks = message.chunks.chunks
            if len(chunks) > MAX_BATCH:
                raise protocol_error(f"{len(chunks)} chunks in one message; at most {MAX_BATCH}")
            return chunks
    return ()
