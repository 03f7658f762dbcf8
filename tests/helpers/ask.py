"""A bare caller of `OmniService.Generate`, what it heard, and the errors it got."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio
import numpy as np
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from numpy.typing import NDArray

from helpers.run import messages
from omnistage.models.toy import formulas
from omnistage.v1 import chunk_pb2, omni_pb2, omni_pb2_grpc, stage_pb2
from omnistage.wire.chunks import chunks_of

TIMEOUT_S = 60.0


def request(
    prompt: str = "hello", seed: int | None = 1, *, thinker: Mapping[str, object] | None = None, **fields: object
) -> omni_pb2.GenerateRequest:
    """A request for a speaking pipeline. thinker: further fields of ThinkerParams."""
    params = stage_pb2.ThinkerParams(**{"messages": messages(prompt), **(thinker or {})})  # type: ignore[arg-type]
    return omni_pb2.GenerateRequest(seed=seed, thinker=params, **fields)  # type: ignore[arg-type]


@dataclass
class WholeAnswer:
    started: omni_pb2.Started | None = None
    chunks: dict[str, list[chunk_pb2.Chunk]] = field(default_factory=dict)
    usage: omni_pb2.Usage | None = None
    failovers: list[stage_pb2.Failover] = field(default_factory=list)

    def take(self, event: omni_pb2.GenerateResponse) -> None:
        """Note an event down; it must come in its place."""
        assert self.usage is None, "an event after Usage"
        match event.WhichOneof("event"):
            case "started":
                assert self.started is None and not self.chunks
                self.started = event.started
            case "chunk" | "chunks":
                assert self.started is not None
                for chunk in chunks_of(event):
                    self.chunks.setdefault(chunk.port, []).append(chunk)
            case "usage":
                self.usage = event.usage
            case "failover":
                self.failovers.append(event.failover)

    def of(self, port: str) -> list[chunk_pb2.Chunk]:
        return self.chunks.get(port, [])

    def text(self) -> str:
        return "".join(chunk.text.text for chunk in self.of("text"))

    def tokens(self) -> list[int]:
        return [token for chunk in self.of("text") for token in chunk.text.token_ids]

    def codes(self) -> list[int]:
        return [code for chunk in self.of("codes") for code in chunk.codes.codes]

    def samples(self) -> NDArray[np.int16]:
        return np.frombuffer(b"".join(chunk.audio.data for chunk in self.of("audio")), "<i2")

    def check_whole(self) -> None:
        """Every port whole and without gap."""
        assert self.started is not None and self.usage is not None
        for port, chunks in self.chunks.items():
            first = 0
            for seq, chunk in enumerate(chunks):
                assert (chunk.seq, chunk.first, chunk.last) == (seq, first, seq == len(chunks) - 1), port
                first += chunk.count

    def check_unspoken(self, every: int) -> None:
        """Checks what a toy Talker told that has no sound for each `every`-th word. All words were wanted."""
        words = [formulas.word(token).strip() for token in self.tokens()[::every]]
        assert self.usage is not None
        (talker,) = (report for report in self.usage.stages if report.kind == stage_pb2.STAGE_KIND_TALKER)
        assert talker.unspoken == sum(map(len, words))
        assert " ".join(words).startswith(talker.unspoken_words)
        assert len(talker.unspoken_words.replace(" ", "")) == min(talker.unspoken, 64)

    def check_toy(
        self, seed: int, prompt: str, length: int = formulas.NATURAL_LENGTH, samples_per_frame: int = formulas.SAMPLES_PER_FRAME
    ) -> None:
        """Every port whole and without gap; text and sound as the formulas of the toy models have them."""
        self.check_whole()
        assert self.text() == formulas.text(seed, prompt, length)
        if "audio" in self.chunks:
            expected = formulas.audio(seed, prompt, length, samples_per_frame)[:, 0] * 32768
            np.testing.assert_array_equal(self.samples(), expected)


async def ask(
    stub: omni_pb2_grpc.OmniServiceAsyncStub,
    asked: omni_pb2.GenerateRequest,
    *,
    timeout_s: float = TIMEOUT_S,
    metadata: Sequence[tuple[str, str]] = (),
) -> WholeAnswer:
    """The whole answer. Raises AioRpcError."""
    answer = WholeAnswer()
    async for event in stub.Generate(asked, timeout=timeout_s, metadata=tuple(metadata)):
        answer.take(event)
    assert answer.usage is not None
    return answer


GenerateCall = grpc.aio.UnaryStreamCall[omni_pb2.GenerateRequest, omni_pb2.GenerateResponse]


async def read(call: GenerateCall) -> omni_pb2.GenerateResponse:
    """The next event, which must be there."""
    event = await call.read()
    assert isinstance(event, omni_pb2.GenerateResponse), "the answer is over"
    return event


async def read_all(call: GenerateCall) -> AsyncIterator[omni_pb2.GenerateResponse]:
    """The rest of an answer of which a part was `read` (grpc.aio does not let reading and iterating be mixed)."""
    while isinstance(event := await call.read(), omni_pb2.GenerateResponse):
        yield event


@dataclass
class Refusal:
    """An error as a client sees it, unpacked from the google.rpc.Status in the trailing metadata."""

    code: grpc.StatusCode
    message: str
    reason: str
    metadata: dict[str, str]
    retry_delay_s: float | None
    fields: list[str]


def refusal(error: grpc.aio.AioRpcError) -> Refusal:
    """Status and details must say the same."""
    trailing = dict(error.trailing_metadata() or ())
    packed = trailing.get("grpc-status-details-bin")
    assert isinstance(packed, bytes), f"no details: {error}"
    status = status_pb2.Status.FromString(packed)
    assert (status.code, status.message) == (error.code().value[0], error.details())
    found: dict[str, Message] = {}
    for detail in status.details:
        for kind in (error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo, error_details_pb2.BadRequest):
            message = kind()
            if detail.Unpack(message):
                found[kind.__name__] = message
    info, retry, bad = found["ErrorInfo"], found.get("RetryInfo"), found.get("BadRequest")
    assert isinstance(info, error_details_pb2.ErrorInfo) and info.domain == "omnistage"
    return Refusal(
        error.code(),
        status.message,
        info.reason,
        dict(info.metadata),
        retry.retry_delay.ToTimedelta().total_seconds() if isinstance(retry, error_details_pb2.RetryInfo) else None,
        [violation.field for violation in bad.field_violations] if isinstance(bad, error_details_pb2.BadRequest) else [],
    )


async def refused(
    stub: omni_pb2_grpc.OmniServiceAsyncStub,
    asked: omni_pb2.GenerateRequest,
    *,
    timeout_s: float = TIMEOUT_S,
    metadata: Sequence[tuple[str, str]] = (),
) -> Refusal:
    """The typed error that a request gets. Raises AssertionError for an answer."""
    try:
        answer = await ask(stub, asked, timeout_s=timeout_s, metadata=metadata)
    except grpc.aio.AioRpcError as error:
        return refusal(error)
    raise AssertionError(f"answered: {answer.text()[:80]!r}")
