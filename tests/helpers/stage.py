"""One stage server and the check that it still works, for the tests of the rules of `Run`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import numpy as np

from helpers.run import RunAnswer, RunStream, code_chunks, open_of, row_chunks, run_once, tensor_of
from helpers.servers import all_free, local_stage, stage_stub, toy_logic
from omnistage.models.toy import formulas
from omnistage.stage.logic import StageLogic
from omnistage.v1 import chunk_pb2, stage_pb2, stage_pb2_grpc

INVALID = grpc.StatusCode.INVALID_ARGUMENT
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION

ROWS = np.stack([formulas.row(token) for token in range(8)])


@dataclass
class Stage:
    """A stage server, its description, and the check that it still works."""

    address: str
    stub: stage_pb2_grpc.StageServiceAsyncStub
    description: stage_pb2.DescribeResponse

    def open(self, **fields: object) -> stage_pb2.Open:
        return open_of(self.description, **fields)  # type: ignore[arg-type]

    def caller(self, timeout_s: float | None = 30.0) -> RunStream:
        return RunStream(self.stub, timeout_s)

    async def begin(self, timeout_s: float | None = 30.0, **fields: Any) -> RunStream:
        """Send an Open with these fields."""
        caller = self.caller(timeout_s)
        await caller.send(open=self.open(**fields))
        return caller

    async def opened(self, **fields: Any) -> RunStream:
        caller = await self.begin(**fields)
        await caller.opened()
        return caller

    async def refuse(self, reason: str, code: grpc.StatusCode = INVALID, **fields: Any) -> stage_pb2.Ended:
        """How an Open with these fields ends, which must be so and at once."""
        caller = await self.begin(**fields)
        ended = await caller.expect(reason, code)
        assert caller.heard.opened is None
        return ended

    async def run(self, inputs: Sequence[chunk_pb2.Chunk] = (), **fields: Any) -> RunAnswer:
        """A whole session."""
        return await run_once(self.stub, self.open(**fields), inputs)

    async def still_works(self) -> None:
        inputs: Sequence[chunk_pb2.Chunk] = ()
        if self.description.kind == stage_pb2.STAGE_KIND_TALKER:
            inputs = row_chunks("hidden", ROWS, [3, 5])
        if self.description.kind == stage_pb2.STAGE_KIND_CODE2WAV:
            inputs = code_chunks(formulas.frames(ROWS), [16])
        (await self.run(inputs)).check_whole([port.name for port in self.description.produces])
        await all_free([self.address])


@asynccontextmanager
async def stage_with(logic: StageLogic, **settings: Any) -> AsyncIterator[Stage]:
    """A stage of this model; when the block ends well, it must hold nothing."""
    async with local_stage(logic, **settings) as server, stage_stub(server.address) as stub:
        yield Stage(server.address, stub, await stub.Describe(stage_pb2.DescribeRequest(), timeout=10))
        await all_free([server.address])


@asynccontextmanager
async def stage_of(kind: str, options: Mapping[str, object] | None = None, **settings: Any) -> AsyncIterator[Stage]:
    """A toy stage of this kind; when the block ends well, it must still take a good session and hold nothing."""
    async with stage_with(toy_logic(kind, options), **settings) as stage:
        yield stage
        await stage.still_works()


def hop_to(*addresses: str, kind: str = "code2wav", **fields: object) -> stage_pb2.Hop:
    """To a toy stage behind. fields: of Hop."""
    values = {"model": f"toy-{kind}", "takes": [{"talker": "hidden", "code2wav": "codes"}[kind]], **fields}
    return stage_pb2.Hop(kind=stage_pb2.StageKind.Value(f"STAGE_KIND_{kind.upper()}"), addresses=addresses, **values)  # type: ignore[arg-type]


def chunk(seq: int = 0, first: int = 0, rows: int = 1, *, port: str = "hidden", last: bool = False) -> chunk_pb2.Chunk:
    return chunk_pb2.Chunk(port=port, seq=seq, first=first, count=rows, last=last, tensor=tensor_of(ROWS[:rows]))
