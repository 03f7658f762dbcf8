"""What a request may hold at most: the one table, enforced before a message is parsed (wire/decoding.py). docs/limits.md is made from it.

Values have ranges of their own, which whoever uses them checks. Here are counts and sizes: what decides how much memory and time a message
costs before anybody has looked at a value.
"""

from __future__ import annotations

from collections.abc import Mapping

MAX_FIELDS = 1 << 19
"""Fields of one request on the wire, known or not, that are looked at: the bound on the time which that takes. A message that can hold
nothing which repeats and no bytes is passed over whole: protobuf makes one object of it, whatever is in it."""

MAX_TEXT_CHARACTERS = 1 << 20
"""Of all messages of a request together."""

TEXT_REQUEST_BYTES = 8 << 20
"""Of a request to a router whose pipelines take text only: all text in four bytes a character, and as much of an answer to go on with."""

HOP_ROOM_BYTES = 4 << 20
"""What a stage takes above the largest request of a client: the router and the links add the route, and output that rebuilds a stage."""

MAX_CALLS = 4096
"""Calls at once of any kind, at a router; one more is refused by gRPC before its request is read."""

MAX_PORTS = 64
"""Ports of one stage and all hops behind it; a pipeline has a handful."""

MAX_HOPS = 8
MAX_ADDRESSES = 8
"""Of one hop."""

MAX_HISTORY = 1 << 15
"""Chunks of an answer that goes on; a link sends one for each port, a client at most one for each token."""

MAX_MESSAGES = 1024
MAX_STOPS = 16
MAX_LOGIT_BIASES = 1024
"""Of one stage."""

MAX_SIGMAS = 1000
MAX_PIPELINE_OPTIONS = 64
"""Of a request, and as many of its pipeline's defaults."""

MAX_CHOICES = 1024
MAX_TOP_LOGPROBS = 20
"""Of one token."""

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
"""Elements of every repeated and map field of the requests of both services, in one request together: all hops share their addresses."""

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
"""Length of every field of bytes; None: only the request limit bounds it."""
