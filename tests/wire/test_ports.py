"""Numbers on a port, and credit: any sequence of pieces and grants keeps the rules."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnistage.connector.tensors import PART_BYTES
from omnistage.connector.transport import Sender
from omnistage.v1 import chunk_pb2, tensor_pb2
from omnistage.wire.chunks import Allowance, PortReader, PortWriter, converts
from omnistage.wire.errors import StageError


def text(writer: PortWriter, count: int, *, last: bool = False) -> list[chunk_pb2.Chunk]:
    return writer.chunks(count, chunk_pb2.TextChunk(text="a" * count) if count else None, last=last)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=50))
def test_what_a_writer_numbers_a_reader_takes(counts: list[int]):
    writer, reader = PortWriter("text"), PortReader("text", granted=len(counts))
    for number, count in enumerate(counts):
        (chunk,) = text(writer, count, last=number == len(counts) - 1)
        assert (chunk.seq, chunk.first, chunk.count) == (number, sum(counts[:number]), count)
        reader.accept(chunk)
    assert writer.ended and reader.ended
    assert (reader.seq, reader.first) == (writer.seq, writer.first) == (len(counts), sum(counts))


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.lists(st.integers(0, 9), min_size=1, max_size=20))
def test_a_port_that_goes_on_is_numbered_from_where_it_stood(seq: int, first: int, counts: list[int]):
    writer, reader = PortWriter("text", seq=seq, first=first), PortReader("text", granted=seq + len(counts), seq=seq, first=first)
    for number, count in enumerate(counts):
        (chunk,) = text(writer, count, last=number == len(counts) - 1)
        assert (chunk.seq, chunk.first) == (seq + number, first + sum(counts[:number]))
        reader.accept(chunk)
    assert reader.ended


def test_nothing_comes_on_a_port_that_had_ended_elsewhere():
    with pytest.raises(StageError, match="PROTOCOL: output after the last"):
        text(PortWriter("text", seq=3, first=9, is_ended=True), 1)
    with pytest.raises(StageError, match="PROTOCOL: chunk after the last"):
        PortReader("text", 99, seq=3, first=9, is_ended=True).accept(chunk_pb2.Chunk(port="text", seq=3, first=9))


@given(st.lists(st.integers(1, 4), min_size=2, max_size=20), st.data())
def test_a_reader_refuses_everything_but_the_next_chunk(counts: list[int], data: st.DataObject):
    writer, reader = PortWriter("text"), PortReader("text", granted=100)
    chunks = [chunk for count in counts for chunk in text(writer, count)]
    taken = data.draw(st.integers(0, len(chunks) - 1))
    for chunk in chunks[:taken]:
        reader.accept(chunk)
    wrong = data.draw(st.sampled_from([chunk for chunk in chunks if chunk.seq != taken]))
    with pytest.raises(StageError, match="PROTOCOL"):
        reader.accept(wrong)
    moved = chunk_pb2.Chunk()
    moved.CopyFrom(chunks[taken])
    moved.first += data.draw(st.integers(1, 5))
    with pytest.raises(StageError, match="PROTOCOL"):
        reader.accept(moved)
    reader.accept(chunks[taken])


@given(st.integers(0, 20), st.integers(0, 20))
def test_a_reader_takes_exactly_what_it_granted(granted: int, sent: int):
    writer, reader = PortWriter("text"), PortReader("text", granted=granted)
    for _ in range(min(granted, sent)):
        reader.accept(*text(writer, 1))
    assert reader.seq == min(granted, sent)
    if sent > granted:
        with pytest.raises(StageError, match="CREDIT_EXCEEDED") as raised:
            reader.accept(*text(writer, 1))
        assert raised.value.metadata == {"port": "text"}
        assert reader.seq == granted


def test_nothing_comes_after_last():
    writer, reader = PortWriter("text"), PortReader("text", granted=9)
    (last,) = text(writer, 0, last=True)
    reader.accept(last)
    with pytest.raises(StageError, match="PROTOCOL: chunk after the last"):
        reader.accept(chunk_pb2.Chunk(port="text", seq=1))
    with pytest.raises(StageError, match="PROTOCOL: output after the last"):
        text(writer, 1)


def test_items_need_a_payload():
    with pytest.raises(StageError, match="without a payload"):
        PortReader("text", granted=1).accept(chunk_pb2.Chunk(port="text", count=1))


@given(st.integers(1, 5), st.booleans())
def test_a_large_tensor_goes_in_parts_and_its_items_count_with_the_last(megabytes: int, last: bool):
    rows = np.ones((2, megabytes * PART_BYTES // 8), np.float32)
    writer = PortWriter("hidden")
    chunks = writer.chunks(2, Sender(None).pack(rows), last=last)
    assert [chunk.count for chunk in chunks] == [0] * (megabytes - 1) + [2]
    assert [chunk.last for chunk in chunks] == [False] * (megabytes - 1) + [last]
    assert [(chunk.seq, chunk.first) for chunk in chunks] == [(n, 0) for n in range(megabytes)]
    assert (writer.first, writer.ended) == (2, last)


@given(st.lists(st.integers(0, 100)))
def test_credit_is_the_greatest_total_ever_granted(totals: list[int]):
    allowance = Allowance()
    for total in totals:
        allowance.grant("audio", total)
    assert allowance.total("audio") == max(totals, default=0)
    assert allowance.total("text") == 0


@given(st.lists(st.integers(0, 12), min_size=1, max_size=12))
def test_a_waiter_goes_on_exactly_when_its_credit_is_there(totals: list[int]):
    async def play() -> None:
        allowance = Allowance()
        sent: list[int] = []

        async def send() -> None:
            for seq in range(10):
                await allowance.wait("audio", seq)
                sent.append(seq)

        sender = asyncio.create_task(send())
        for n, total in enumerate(totals):
            allowance.grant("audio", total)
            allowance.grant("text", 1000)
            for _ in range(3):
                await asyncio.sleep(0)
            assert len(sent) == min(max(totals[: n + 1]), 10)
        allowance.close("HALF_CLOSED", "over")
        if max(totals) >= 10:
            await sender
        else:
            with pytest.raises(StageError, match="HALF_CLOSED"):
                await sender

    asyncio.run(play())


async def test_every_waiter_hears_of_every_grant():
    allowance = Allowance()
    waiting = [asyncio.create_task(allowance.wait(port, seq)) for port in "ab" for seq in range(5)]
    for total in range(1, 6):
        allowance.grant("a", total)
        await asyncio.sleep(0)
        allowance.grant("b", total)
    async with asyncio.timeout(5):
        await asyncio.gather(*waiting)


async def test_credit_that_is_there_survives_the_half_close():
    allowance = Allowance()
    allowance.grant("audio", 2)
    allowance.close("HALF_CLOSED", "over")
    await allowance.wait("audio", 0)
    await allowance.wait("audio", 1)
    with pytest.raises(StageError, match="HALF_CLOSED"):
        await allowance.wait("audio", 2)


def test_only_floating_types_are_taken_for_each_other() -> None:
    assert converts(tensor_pb2.ELEMENT_TYPE_BFLOAT16, tensor_pb2.ELEMENT_TYPE_FLOAT32)
    assert converts(tensor_pb2.ELEMENT_TYPE_INT32, tensor_pb2.ELEMENT_TYPE_INT32)
    assert not converts(tensor_pb2.ELEMENT_TYPE_INT32, tensor_pb2.ELEMENT_TYPE_FLOAT32)
    assert not converts(tensor_pb2.ELEMENT_TYPE_FLOAT32, tensor_pb2.ELEMENT_TYPE_INT64)
