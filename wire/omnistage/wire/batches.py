"""Several small chunks in one message. It means the same as one message for each chunk, and costs less."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from omnistage.v1 import chunk_pb2, omni_pb2, stage_pb2
from omnistage.wire.errors import protocol_error
from omnistage.wire.limits import MAX_BATCH

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
        self._most = MAX_BATCH if together else 1
        self._chunks: list[chunk_pb2.Chunk] = []
        self._bytes = 0

    def add(self, *chunks: chunk_pb2.Chunk) -> bool:
        """Add all of these chunks or none of them. Return whether they were added."""
        size = sum(chunk.ByteSize() for chunk in chunks)
        if self._chunks and (len(self._chunks) + len(chunks) > self._most or self._bytes + size > MAX_BATCH_BYTES):
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
