"""The input side of a session on its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from helpers.run import code_chunks, row_chunks, tensor_of
from helpers.servers import toy_logic
from omnistage.connector.arena import Arena
from omnistage.connector.transport import Receiver, Sender
from omnistage.models.toy import formulas
from omnistage.stage.inputs import CODES_WINDOW, WINDOW, Inputs
from omnistage.v1 import chunk_pb2, stage_pb2, tensor_pb2
from omnistage.wire.errors import StageError

CODES = toy_logic("code2wav").description.accepts
PORTS = toy_logic("talker").description.accepts
ROWS = np.stack([formulas.row(token) for token in range(8)])


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(max_bytes=1 << 20, segment_bytes=1 << 18)
    assert arena is not None
    yield arena
    arena.close()


@pytest.fixture
def sender(arena: Arena) -> Iterator[Sender]:
    sender = Sender(arena, inline_limit=0)
    yield sender
    sender.close(clean=True)


@pytest.fixture
def receiver(sender: Sender) -> Receiver:
    """It takes tensors in the memory of the sender."""
    receiver = Receiver()
    sender.accept(receiver.answer(sender.offers()))
    return receiver


def chunk(seq: int, tensor: tensor_pb2.Tensor | None = None, *, last: bool = False) -> chunk_pb2.Chunk:
    return chunk_pb2.Chunk(port="hidden", seq=seq, first=seq, count=1, last=last, tensor=tensor or tensor_of(ROWS[:1]))


async def nobody(message: stage_pb2.RunResponse) -> None:
    """Hears no reply."""


async def test_what_arrives_while_memory_is_given_back_is_not_overlooked(sender: Sender, receiver: Receiver):
    """The write that gives memory back lets other tasks run; a chunk that one of them takes in then must wake the one that waits for it."""
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
    inputs = Inputs(PORTS, Receiver(), nobody)
    inputs.put(chunk(0))
    inputs.half_close()
    assert (await anext(inputs)).first == 0
    with pytest.raises(StageError, match=r"HALF_CLOSED.*\['hidden'\]"):
        await anext(inputs)


async def test_views_are_given_back_when_a_session_ends_early(arena: Arena, sender: Sender, receiver: Receiver):
    inputs = Inputs(PORTS, receiver, nobody)
    for n in range(5):
        inputs.put(chunk(n, *sender.pack(ROWS[n : n + 1])))
    first = await anext(inputs)
    assert receiver.view_count == 5
    del first
    inputs.close()
    assert receiver.view_count == 0
    receiver.close()
    sender.close(clean=True)
    assert arena.leases == 0


async def _taken(inputs: Inputs) -> tuple[list[int], list[list[float]]]:
    """Where each piece with items begins, and all items."""
    firsts: list[int] = []
    items: list[list[float]] = []
    async for piece in inputs:
        whole: NDArray[Any]
        match piece.payload:
            case chunk_pb2.CodeChunk() as codes:
                whole = np.array(codes.codes, np.float64).reshape(piece.count, codes.codebook_count)
            case np.ndarray() as rows:
                whole = rows
            case _:
                assert piece.payload is None
                whole = np.empty((0, 1))
        assert len(whole) == piece.count
        firsts.extend([piece.first] * bool(piece.count))
        items.extend(whole.tolist())
    return firsts, items


@given(
    port=st.sampled_from(["codes", "hidden"]),
    cuts=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    needed=st.integers(0, 40),
    earlier=st.integers(0, 3),
)
def test_a_port_that_goes_on_gives_its_items_from_the_needed_one(port: str, cuts: Sequence[int], needed: int, earlier: int) -> None:
    """The caller sends from some piece before, or from the one that holds it; a port of which all is needed comes whole."""
    cuts = cuts[:CODES_WINDOW] if port == "codes" else cuts
    total = sum(cuts)
    width = formulas.CODEBOOKS if port == "codes" else formulas.WIDTH
    items = np.arange(total * width).reshape(total, width)
    chunks = code_chunks(items.astype(np.uint32), cuts) if port == "codes" else row_chunks("hidden", items.astype(np.float32), cuts)
    if port == "codes":
        holding = next((n for n, chunk in enumerate(chunks) if chunk.first + chunk.count > needed), len(chunks) - 1)
        chunks = chunks[max(holding - earlier, 0) :]
        for seq, chunk in enumerate(chunks):
            chunk.seq = seq

    async def play() -> None:
        inputs = Inputs(CODES if port == "codes" else PORTS, Receiver(), nobody)
        inputs.go_on_from({port: needed})
        for chunk in chunks:
            inputs.put(chunk)
        firsts, taken = await _taken(inputs)
        assert taken == items[needed:].tolist()
        assert all(first >= min(needed, total) for first in firsts)
        assert inputs.items == {port: max(total - needed, 0)}

    asyncio.run(play())


async def test_a_tensor_in_parts_is_cut_when_it_is_whole():
    data = ROWS.astype("<f4").tobytes()
    inputs = Inputs(PORTS, Receiver(), nobody)
    inputs.go_on_from({"hidden": 6})
    for seq, (begin, end) in enumerate([(0, 300), (300, 700), (700, len(data))]):
        inline = tensor_pb2.InlinePart(data=data[begin:end], offset=begin, total_bytes=len(data))
        tensor = tensor_pb2.Tensor(element_type=tensor_pb2.ELEMENT_TYPE_FLOAT32, shape=ROWS.shape, inline=inline)
        last = end == len(data)
        inputs.put(chunk_pb2.Chunk(port="hidden", seq=seq, first=0, count=len(ROWS) if last else 0, last=last, tensor=tensor))
    assert await _taken(inputs) == ([6], ROWS[6:].tolist())


@pytest.mark.parametrize("first", [1, 3, (1 << 64) - 1])
async def test_a_port_that_must_be_replayed_whole_may_not_begin_later(first: int):
    inputs = Inputs(PORTS, Receiver(), nobody)
    inputs.go_on_from({})
    late = chunk(0)
    late.first = first
    with pytest.raises(StageError, match="PROTOCOL"):
        inputs.put(late)


async def test_text_cannot_be_cut():
    """Its characters do not say which token they come from; a stage that takes text needs all of it."""
    text = stage_pb2.Port(name="text", payload=stage_pb2.PAYLOAD_TEXT, replay=stage_pb2.REPLAY_ALL)
    inputs = Inputs([text], Receiver(), nobody)
    inputs.go_on_from({"text": 1})
    inputs.put(chunk_pb2.Chunk(port="text", count=2, last=True, text=chunk_pb2.TextChunk(text="a b ", token_ids=[1, 2])))
    with pytest.raises(StageError, match="PROTOCOL"):
        await anext(inputs)


async def test_what_comes_after_the_end_of_a_session_is_not_held(sender: Sender, receiver: Receiver):
    """A caller may not have seen Ended yet."""
    inputs = Inputs(PORTS, receiver, nobody)
    inputs.put(chunk(0, *sender.pack(ROWS[:1])))
    inputs.close()
    inputs.put(chunk(1, *sender.pack(ROWS[:1])))
    assert receiver.view_count == 0


async def test_what_waits_when_the_caller_interrupts_is_dropped(sender: Sender, receiver: Receiver):
    """Its memory is given back; what is in use stays as it is until it is not."""
    released = list[tensor_pb2.Release]()

    async def reply(message: stage_pb2.RunResponse) -> None:
        if message.HasField("release"):
            released.append(message.release)
            sender.release(message.release)

    inputs = Inputs(PORTS, receiver, reply)
    for n in range(4):
        inputs.put(chunk(n, *sender.pack(ROWS[n : n + 1])))
    taken = []
    async with asyncio.timeout(10):
        async for piece in inputs:
            inputs.interrupt()
            assert isinstance(piece.payload, np.ndarray)
            taken.append(piece.payload.copy())
            del piece  # It is a view of that memory.
    assert np.array_equal(np.concatenate(taken), ROWS[:1])
    assert released and not sender.outstanding
