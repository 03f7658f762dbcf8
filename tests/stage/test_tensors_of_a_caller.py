"""Tensors between a stage and whoever calls it directly: bad rows, and memory that is never given back."""

from __future__ import annotations

import grpc
import numpy as np
import pytest

from helpers.run import PLENTY, RunStream, open_of, row_chunks
from helpers.servers import all_free, family_logic, local_stage, stage_stub, toy_logic
from omnistage.connector.transport import Receiver
from omnistage.v1 import stage_pb2


@pytest.mark.parametrize("what", ["nan", "order", "length"])
async def test_rows_that_the_model_refuses_are_a_bad_request(what: str) -> None:
    """Not INTERNAL: the caller can mend it."""
    logic = family_logic("smol", "code2wav")
    (port,) = logic.description.accepts
    rows = np.zeros((4, port.width), np.float32)
    rows[:, -2], rows[:, -1] = np.arange(4), 4
    if what == "nan":
        rows[2, 0] = np.nan
    elif what == "order":
        rows[1, -2] = 3
    else:
        rows[:, -1] = 1e6
    async with local_stage(logic) as stage, stage_stub(stage.address) as stub:
        caller = RunStream(stub)
        await caller.send(open=open_of(logic.description))
        await caller.opened()
        for chunk in row_chunks(port.name, rows, [4]):
            await caller.send(chunk=chunk)
        ended = await caller.expect("BAD_REQUEST", grpc.StatusCode.INVALID_ARGUMENT)
        assert ended.metadata["field"] == port.name
        await all_free([stage.address])


async def test_a_caller_that_half_closes_and_keeps_its_rows_does_not_hold_the_session() -> None:
    """No Release can come any more: the end of the stream gives the blocks back. Rows get credit after the answer to the offer, so that not
    all of them have gone inside messages by then."""
    logic = toy_logic("thinker", {"max_chunk": 1})
    async with local_stage(logic, arena_bytes=256 << 20, inline_limit=0) as stage, stage_stub(stage.address) as stub:
        caller = RunStream(stub)
        without_rows = {port.name: 0 if port.name == "hidden" else PLENTY for port in logic.description.produces}
        await caller.send(open=open_of(logic.description, without_rows))
        opened = await caller.opened()
        receiver = Receiver()
        answer = receiver.answer(opened.offers)
        assert answer.kind != 0 and answer.probe
        await caller.send(answer=answer)
        await caller.send(credit=stage_pb2.Credit(port="hidden", total=PLENTY))
        await caller.until(lambda heard: any(chunk.tensor.HasField("shared_memory") for chunk in heard.of("hidden")))
        await caller.call.done_writing()
        heard = await caller.finish()
        assert heard.ended == stage_pb2.Ended()
        receiver.close()
        await all_free([stage.address])
