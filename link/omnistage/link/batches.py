"""Several small chunks in one message: the same as each of them by itself, for less."""

from __future__ import annotations

from collections.abc import Sequence

from omnistage.link.errors import protocol_error
from omnistage.link.limits import MAX_BATCH
from omnistage.v1 import chunk_pb2, omni_pb2, stage_pb2

MAX_BATCH_BYTES = 32 << 10
"""Of chunks that a sender puts together: beyond it a message costs by its bytes, and nothing is won by fewer of them."""

Message = stage_pb2.RunRequest | stage_pb2.RunResponse | omni_pb2.GenerateResponse


def chunks_of(message: Message) -> Sequence[chunk_pb2.Chunk]:
    """The chunks of a message that has one, or several, or none. Raises PROTOCOL for too many."""
    match message.WhichOneof("event"):
        case "chunk":
            return (message.chunk,)
        case "chunks":
            chunks = message.chunks.chunks
            if len(chunks) > MAX_BATCH:
                raise protocol_error(f"{len(chunks)} chunks in one message; at most {MAX_BATCH}")
            return chunks
    return ()
