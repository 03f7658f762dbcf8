"""The limits of a request, in one table, enforced before a message is parsed (wire/decoding.py). docs/limits.md is made from it.

The code that uses a value checks its range. This table has counts and sizes, because they decide how much memory and time a message costs
before any value is looked at.
"""

from __future__ import annotations

from collections.abc import Mapping

MAX_FIELDS = 1 << 19
"""Largest number of fields of one request on the wire, known or unknown, which limits the time of the walk over them. A message whose type
has no repeated field and no bytes counts as one field, because protobuf makes one object of it, whatever is in it."""

MAX_TEXT_CHARACTERS = 1 << 20
"""Largest number of characters in all messages of one request together."""

TEXT_REQUEST_BYTES = 8 << 20
"""Largest size in bytes of a request to a router whose pipelines take text only: all text at four bytes a character, and as many bytes for
an answer that goes on."""

HOP_ROOM_BYTES = 4 << 20
"""Bytes that a stage accepts above the largest request of a client, because the router and the links add the route, and output that
rebuilds a stage."""

MAX_CALLS = 4096
"""Largest number of open calls of any kind at a router. gRPC refuses further calls before it reads their requests."""

MAX_PORTS = 64
"""Ports of one stage and all stages after it; a pipeline has a handful."""

MAX_HOPS = 8
MAX_ADDRESSES = 8
"""Addresses of one hop."""

MAX_HISTORY = 1 << 15
"""Chunks of an answer that goes on; a link sends one for each port, a client at most one for each token."""

MAX_MESSAGES = 1024
MAX_STOPS = 16
MAX_LOGIT_BIASES = 1024
"""Largest number of logit biases in the params of one stage."""

MAX_SIGMAS = 1000
MAX_PIPELINE_OPTIONS = 64
"""Pipeline options of a request; the defaults of its pipeline may be as many again."""

MAX_CHOICES = 1024
MAX_TOP_LOGPROBS = 20
"""Largest number of top logprobs of one token."""

MAX_BATCH = 32
"""Chunks in one message."""

COUNTS: Mapping[str, int] = {
    "GenerateRequest.outputs": 16,
    "GenerateRequest.revisions": 16,
    "ThinkerParams.messages": MAX_MESSAGES,
    "Message.parts": 4 * MAX_MESSAGES,
    "ThinkerParams.stop": MAX_STOPS,
    "Sampling.logit_bias": 2 * MAX_LOGIT_BIASES,
    "Choices.texts": MAX_CHOICES,
    "DiffusionParams.images": 16,
    "DiffusionParams.sigmas": MAX_SIGMAS,
    "DiffusionParams.options": 2 * MAX_PIPELINE_OPTIONS,
    "Resume.positions": MAX_PORTS,
    "Resume.history": MAX_HISTORY,
    "TextChunk.token_ids": 1 << 18,
    "TextChunk.logprobs": 1 << 18,
    "TextChunk.top_logprobs": 1 << 12,
    "TextChunk.pieces": 1 << 12,
    "TopLogprobs.token_ids": MAX_TOP_LOGPROBS << 12,
    "TopLogprobs.logprobs": MAX_TOP_LOGPROBS << 12,
    "TopLogprobs.pieces": MAX_TOP_LOGPROBS << 12,
    "CodeChunk.codes": 1 << 20,
    "AlignmentChunk.words": 1 << 12,
    "Tensor.shape": 8 * MAX_BATCH,
    "Open.route": MAX_HOPS,
    "Open.credits": MAX_PORTS,
    "Open.checkpoints": MAX_PORTS,
    "Open.unwanted": MAX_PORTS,
    "Open.offers": 8,
    "Open.attempts": MAX_HOPS + 1,
    "Hop.addresses": MAX_HOPS * MAX_ADDRESSES,
    "Hop.takes": MAX_PORTS,
    "Hop.checkpoints": MAX_PORTS,
    "Hop.unwanted": MAX_PORTS,
    "Release.slots": 1 << 14,
    "Chunks.chunks": MAX_BATCH,
}
"""Largest number of elements of every repeated and map field of the requests of both services, counted in one whole request: all hops
together may have as many addresses."""

BYTES: Mapping[str, int | None] = {
    "Media.data": None,
    "TopLogprobs.pieces": 1 << 10,
    "TextChunk.pieces": 1 << 10,
    "InlinePart.data": 1 << 20,
    "AudioChunk.data": 256 << 10,
    "VideoChunk.data": 1 << 20,
    "MediaChunk.data": 256 << 10,
    "SharedMemorySlot.arena": 64 << 10,
    "CudaIpcSlot.arena": 64 << 10,
    "Offer.arena": 64 << 10,
    "Offer.metadata": 64 << 10,
    "Answer.probe": 64 << 10,
}
"""Largest size of every field of bytes; None: only the size of the request limits it."""
