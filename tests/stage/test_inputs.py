"""The input side of a session on its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from helpers.run import tensor_of
from helpers.servers import toy_logic
from omnistage.connector.arena import Arena
from omnistage.connector.transport import Receiver, Sender
from omnistage.link.errors import StageError
from omnistage.models.toy import formulas
from omnistage.stage.inputs import WINDOW, Inputs
from omnistage.v1 import chunk_pb2, stage_pb2, tensor_pb2

PORTS = toy_logic("talker").description.accepts
ROWS = np.stack([formulas.row(token) for token in range(8)])


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(max_bytes=1 << 20, segment_bytes=1 << 18)
    assert arena is not None
    yield arena
    arena.close()


def chunk(seq: int, tensor: tensor_pb2.Tensor | None = None, *, last: bool = False) -> chunk_pb2.Chunk:
    return chunk_pb2.Chunk(port="hidden", seq=seq, first=seq, count=1, last=last, tensor=tensor or tensor_of(ROWS[:1]))


async def test_what_arrives_while_memory_is_given_back_is_not_overlooked(arena: Arena):
    """The write that gives memory back lets other tasks run; a chunk that one of them takes in then must wake the one that waits for it."""
    sender, receiver = Sender(arena, inline_limit=0), Receiver()
    sender.accept(receiver.answer(sender.offers()))
    tensors = [tensor for n in range(3) for tensor in sender.pack(ROWS[n : n + 1])]
    waiting = [chunk(n, tensor, last=n == 2) for n, tensor in enumerate(tensors)]
    inputs: Inputs

    async def reply(message: stage_pb2.RunResponse) -> None:
        if message.HasField("release"):
            sender.release(message.release)
            if waiting:
                inputs.put(waiting.pop(0))
        await asyncio.sleep(0)

    inputs = Inputs(PORTS, receiver, reply)
    inputs.put(waiting.pop(0))
    taken = []
    async with asyncio.timeout(10):
        async for piece in inputs:
            assert isinstance(piece.payload, np.ndarray)
            taken.append(piece.payload.tolist())
            del piece
    assert taken == [ROWS[n : n + 1].tolist() for n in range(3)]
    inputs.close()
    assert sender.outstanding == 0 and inputs.items == {"hidden": 3}
    sender.close(clean=True)


async def test_credit_grows_by_half_windows_as_the_stage_takes():
    granted = []

    async def reply(message: stage_pb2.RunResponse) -> None:
        granted.append(message.credit.total)

    inputs = Inputs(PORTS, Receiver(), reply)
    assert [(credit.port, credit.total) for credit in inputs.credits()] == [("hidden", WINDOW)]
    for seq in range(4 * WINDOW):
        inputs.put(chunk(seq))
        await anext(inputs)
    assert granted == [WINDOW // 2 * n + WINDOW for n in range(1, 9)]


async def test_half_close_is_told_only_after_what_had_come():
    async def reply(message: stage_pb2.RunResponse) -> None:
        return

    inputs = Inputs(PORTS, Receiver(), reply)
    inputs.put(chunk(0))
    inputs.half_close()
    assert (await anext(inputs)).first == 0
    with pytest.raises(StageError, match=r"HALF_CLOSED.*\['hidden'\]"):
        await anext(inputs)


async def test_views_are_given_back_when_a_session_ends_early(arena: Arena):
    sender, receiver = Sender(arena, inline_limit=0), Receiver()
    sender.accept(receiver.answer(sender.offers()))

    async def reply(message: stage_pb2.RunResponse) -> None:
        return

    inputs = Inputs(PORTS, receiver, reply)
    for n in range(5):
        inputs.put(chunk(n, *sender.pack(ROWS[n : n + 1])))
    first = await anext(inputs)
    assert receiver.held == 5
    del first
    inputs.close()
    assert receiver.held == 0
    receiver.close()
    sender.close(clean=True)
    assert arena.leases == 0
