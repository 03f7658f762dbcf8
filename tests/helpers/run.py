"""A bare caller of `StageService.Run`, and what it heard. It knows no link: tests of the stage's own rules use it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import grpc
import grpc.aio
import numpy as np
from numpy.typing import NDArray

from omnistage.v1 import chunk_pb2, stage_pb2, stage_pb2_grpc, tensor_pb2
from omnistage.wire.proto_values import kind_name

PLENTY = 1 << 20
"""Credit that no test uses up."""

Rows = TypeVar("Rows", NDArray[np.float32], NDArray[np.uint32])

ELEMENT_TYPES = {
    "float32": tensor_pb2.ELEMENT_TYPE_FLOAT32,
    "int32": tensor_pb2.ELEMENT_TYPE_INT32,
    "int64": tensor_pb2.ELEMENT_TYPE_INT64,
    "uint16": tensor_pb2.ELEMENT_TYPE_BFLOAT16,
}
"""By the name of NumPy's type, which has the bits of bfloat16 as integers."""

TIMEOUT_S = 30.0
SESSION = "session-1"


def params(kind: str, prompt: str = "hello", **fields: object) -> stage_pb2.StageParams:
    """Params of a kind: a user's message and room for 256 tokens for a Thinker, a prompt for a Diffusion, defaults for the others."""
    usual: Mapping[str, Mapping[str, object]] = {
        "thinker": {"messages": messages(prompt), "max_tokens": 256},
        "diffusion": {"prompt": prompt},
    }
    chosen = stage_pb2.StageParams()
    own = getattr(chosen, kind)
    own.CopyFrom(type(own)(**{**usual.get(kind, {}), **fields}))
    return chosen


def messages(prompt: str) -> list[stage_pb2.Message]:
    return [stage_pb2.Message(role="user", parts=[stage_pb2.Part(text=prompt)])]


def open_of(description: stage_pb2.DescribeResponse, credits: Mapping[str, int] | None = None, **fields: object) -> stage_pb2.Open:
    """An Open that this stage takes; credits: plenty for every port by default."""
    kind = kind_name(description.kind)
    given = {port.name: PLENTY for port in description.produces} if credits is None else credits
    values: dict[str, object] = {
        "session_id": SESSION,
        "model": description.model,
        "params": params(kind),
        "credits": [stage_pb2.Credit(port=port, total=total) for port, total in given.items()],
        **fields,
    }
    return stage_pb2.Open(**values)  # type: ignore[arg-type]


@dataclass
class RunAnswer:
    """All that came up a stream. code: of the gRPC status."""

    opened: stage_pb2.Opened | None = None
    chunks: dict[str, list[chunk_pb2.Chunk]] = field(default_factory=dict)
    credits: dict[str, int] = field(default_factory=dict)
    reports: list[stage_pb2.Report] = field(default_factory=list)
    ended: stage_pb2.Ended | None = None
    code: grpc.StatusCode | None = None
    details: str | None = None

    def of(self, port: str) -> list[chunk_pb2.Chunk]:
        return self.chunks.get(port, [])

    def text(self) -> str:
        return "".join(chunk.text.text for chunk in self.of("text"))

    def codes(self) -> NDArray[np.uint32]:
        """[frames, codebooks]."""
        parts = [np.array(c.codes.codes, np.uint32).reshape(c.count, -1) for c in self.of("codes") if c.count]
        return np.concatenate(parts)

    def rows(self, port: str) -> NDArray[np.float32]:
        """[rows, width] of a tensor port whose tensors came inline."""
        data, width = b"", 0
        for chunk in self.of(port):
            data += chunk.tensor.inline.data
            width = chunk.tensor.shape[1] if chunk.tensor.shape else width
        return np.frombuffer(data, "<f4").reshape(-1, width)

    def samples(self) -> NDArray[np.int16]:
        return np.frombuffer(b"".join(chunk.audio.data for chunk in self.of("audio")), "<i2")

    def check_whole(self, ports: Sequence[str]) -> None:
        """Every port came without gap, from 0 to `last`, one Report came per stage at least, and the session ended well."""
        assert self.ended is not None and self.ended.code == 0 and self.ended.reason == "", self.ended
        assert (self.code, self.details) == (grpc.StatusCode.OK, "")
        assert set(self.chunks) == set(ports)
        for name, chunks in self.chunks.items():
            first = 0
            for seq, chunk in enumerate(chunks):
                assert (chunk.seq, chunk.first) == (seq, first), (name, chunk.seq, chunk.first)
                first += chunk.count
            assert [chunk.last for chunk in chunks] == [False] * (len(chunks) - 1) + [True], name
        assert self.reports


class RunStream:
    """One `Run` stream. Reads only when it is told to."""

    def __init__(
        self, stub: stage_pb2_grpc.StageServiceAsyncStub, timeout_s: float | None = TIMEOUT_S, metadata: Sequence[tuple[str, str]] = ()
    ) -> None:
        self.call: grpc.aio.StreamStreamCall[stage_pb2.RunRequest, stage_pb2.RunResponse] = stub.Run(
            timeout=timeout_s, metadata=tuple(metadata)
        )
        self.heard = RunAnswer()
        self._reading: asyncio.Future[object] | None = None

    async def send(self, **event: object) -> None:
        """Write one RunRequest; a stream that is over takes nothing more, which its reading side tells."""
        await self.call.write(stage_pb2.RunRequest(**event))  # type: ignore[arg-type]

    async def read(self) -> stage_pb2.RunResponse | None:
        """The next message, noted down; None at the end of the stream."""
        async with asyncio.timeout(TIMEOUT_S):
            message = await (self._reading or self.call.read())
        self._reading = None
        if not isinstance(message, stage_pb2.RunResponse):
            assert message is grpc.aio.EOF
            return None
        heard = self.heard
        assert heard.ended is None, "a message after Ended"
        match message.WhichOneof("event"):
            case "opened":
                assert heard.opened is None and not heard.chunks
                heard.opened = message.opened
                heard.credits.update({credit.port: credit.total for credit in message.opened.credits})
            case "chunk":
                assert heard.opened is not None
                heard.chunks.setdefault(message.chunk.port, []).append(message.chunk)
            case "credit":
                assert message.credit.total > heard.credits[message.credit.port]
                heard.credits[message.credit.port] = message.credit.total
            case "report":
                heard.reports.append(message.report)
            case "ended":
                heard.ended = message.ended
        return message

    async def until_silent(self, silence_s: float = 1.0) -> None:
        """Read until nothing has come for a while; the read that waits then is taken up by the next `read`."""
        while True:
            self._reading = asyncio.ensure_future(self.call.read())
            if not (await asyncio.wait({self._reading}, timeout=silence_s))[0]:
                return
            await self.read()

    async def opened(self) -> stage_pb2.Opened:
        """Read the first message, which must be Opened."""
        message = await self.read()
        assert message is not None and message.HasField("opened"), message
        return message.opened

    async def until(self, condition: Callable[[RunAnswer], bool]) -> None:
        while not condition(self.heard):
            assert await self.read() is not None, f"the stream ended first: {self.heard.ended}"

    async def finish(self, pause: Callable[[], Awaitable[object]] | None = None) -> RunAnswer:
        """Read up to Ended, half-close, take the status. pause: awaited before every read."""
        while self.heard.ended is None:
            if pause is not None:
                await pause()
            if await self.read() is None:
                break
        with suppress(grpc.aio.InternalError):  # The stream ended without waiting for this, as it may at a deadline.
            await self.call.done_writing()
        self.heard.code = await self.call.code()
        self.heard.details = await self.call.details()
        return self.heard

    async def expect(self, reason: str, code: grpc.StatusCode) -> stage_pb2.Ended:
        """Finish, and check that Ended and the status say the same: this reason."""
        heard = await self.finish()
        assert heard.ended is not None, (heard.code, heard.details)
        assert (heard.ended.reason, heard.ended.code) == (reason, code.value[0]), heard.ended
        assert (heard.code, heard.details) == (code, heard.ended.message)
        assert heard.ended.message
        return heard.ended


async def run_once(
    stub: stage_pb2_grpc.StageServiceAsyncStub, opening: stage_pb2.Open, inputs: Sequence[chunk_pb2.Chunk] = ()
) -> RunAnswer:
    """A whole good session: Open, all inputs within the credit, everything up to the status."""
    caller = RunStream(stub)
    await caller.send(open=opening)
    await caller.opened()
    for chunk in inputs:
        await caller.until(lambda heard, chunk=chunk: heard.credits[chunk.port] > chunk.seq)  # type: ignore[misc]
        await caller.send(chunk=chunk)
    return await caller.finish()


async def run_interrupted(stub: stage_pb2_grpc.StageServiceAsyncStub, opening: stage_pb2.Open, port: str) -> RunAnswer:
    """As `run_once`, but interrupted when the first of a port has come."""
    caller = RunStream(stub)
    await caller.send(open=opening)
    await caller.until(lambda heard: bool(heard.of(port)))
    await caller.send(interrupt=stage_pb2.Interrupt())
    return await caller.finish()


def tensor_of(rows: NDArray[np.generic]) -> tensor_pb2.Tensor:
    """[n, width] in its own element type as one inline tensor."""
    data = np.ascontiguousarray(rows).tobytes()
    inline = tensor_pb2.InlinePart(data=data, offset=0, total_bytes=len(data))
    return tensor_pb2.Tensor(element_type=ELEMENT_TYPES[rows.dtype.name], shape=rows.shape, inline=inline)


def row_chunks(port: str, rows: NDArray[np.float32], cuts: Sequence[int]) -> list[chunk_pb2.Chunk]:
    """Rows as chunks of the given sizes, the last one with `last`."""
    return _numbered([chunk_pb2.Chunk(port=port, count=len(part), tensor=tensor_of(part)) for part in _split(rows, cuts)])


def code_chunks(codes: NDArray[np.uint32], cuts: Sequence[int]) -> list[chunk_pb2.Chunk]:
    """[frames, codebooks] as chunks of the given sizes, the last one with `last`."""

    def chunk(part: NDArray[np.uint32]) -> chunk_pb2.Chunk:
        carried = chunk_pb2.CodeChunk(codes=part.ravel().tolist(), codebook_count=codes.shape[1])
        return chunk_pb2.Chunk(port="codes", count=len(part), codes=carried)

    return _numbered([chunk(part) for part in _split(codes, cuts)])


def _split(rows: Rows, cuts: Sequence[int]) -> list[Rows]:
    assert sum(cuts) == len(rows)
    return np.split(rows, np.cumsum(cuts)[:-1])


def _numbered(chunks: list[chunk_pb2.Chunk]) -> list[chunk_pb2.Chunk]:
    first = 0
    for seq, chunk in enumerate(chunks):
        chunk.seq, chunk.first = seq, first
        first += chunk.count
    chunks[-1].last = True
    return chunks
