"""Numbers on a port, credit, and several chunks in one message: any sequence of pieces and grants keeps the rules."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.ask import WholeAnswer, read_all, request
from helpers.link import ENDED, Context, bare_peer, chunk, hear, heard, link_by, listen, opening, route_to, say, says
from helpers.servers import Local, all_free, local_chain, local_router, omni_stub
from omnistage.client import AsyncOmni
from omnistage.connector.tensors import PART_BYTES
from omnistage.connector.transport import Sender
from omnistage.models.toy import formulas
from omnistage.v1 import chunk_pb2, omni_pb2, stage_pb2, tensor_pb2
from omnistage.wire.chunks import MAX_BATCH_BYTES, Allowance, Output, PortReader, PortWriter, batch_chunks, chunks_of, converts
from omnistage.wire.errors import StageError
from omnistage.wire.limits import MAX_BATCH


def text(writer: PortWriter, count: int, *, last: bool = False) -> list[chunk_pb2.Chunk]:
    return writer.chunks(count, chunk_pb2.TextChunk(text="a" * count) if count else None, last=last)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=50))
def test_what_a_writer_numbers_a_reader_takes(counts: list[int]):
    writer, reader = PortWriter("text"), PortReader("text", granted=len(counts))
    for number, count in enumerate(counts):
        (chunk,) = text(writer, count, last=number == len(counts) - 1)
        assert (chunk.seq, chunk.first, chunk.count) == (number, sum(counts[:number]), count)
        reader.accept(chunk)
    assert writer.is_ended and reader.is_ended
    assert (reader.seq, reader.first) == (writer.seq, writer.first) == (len(counts), sum(counts))


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.lists(st.integers(0, 9), min_size=1, max_size=20))
def test_a_port_that_goes_on_is_numbered_from_where_it_stood(seq: int, first: int, counts: list[int]):
    writer, reader = PortWriter("text", seq=seq, first=first), PortReader("text", granted=seq + len(counts), seq=seq, first=first)
    for number, count in enumerate(counts):
        (chunk,) = text(writer, count, last=number == len(counts) - 1)
        assert (chunk.seq, chunk.first) == (seq + number, first + sum(counts[:number]))
        reader.accept(chunk)
    assert reader.is_ended


@given(st.lists(st.integers(1, 4), min_size=2, max_size=20), st.data())
def test_a_reader_refuses_everything_but_the_next_chunk(counts: list[int], data: st.DataObject):
    writer, reader = PortWriter("text"), PortReader("text", granted=100)
    chunks = [chunk for count in counts for chunk in text(writer, count)]
    taken = data.draw(st.integers(0, len(chunks) - 1))
    for earlier in chunks[:taken]:
        reader.accept(earlier)
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
        assert (raised.value.metadata, reader.seq) == ({"port": "text"}, granted)


def test_nothing_comes_after_last_or_on_a_port_that_had_ended_elsewhere():
    writer, reader = PortWriter("text"), PortReader("text", granted=9)
    (last,) = text(writer, 0, last=True)
    reader.accept(last)
    ended = PortWriter("text", seq=3, first=9, is_ended=True), PortReader("text", 99, seq=3, first=9, is_ended=True)
    for (one, other), seq, first in (((writer, reader), 1, 0), (ended, 3, 9)):
        with pytest.raises(StageError, match="PROTOCOL: chunk after the last"):
            other.accept(chunk_pb2.Chunk(port="text", seq=seq, first=first))
        with pytest.raises(StageError, match="PROTOCOL: output after the last"):
            text(one, 1)


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
    assert (writer.first, writer.is_ended) == (2, last)


@given(st.lists(st.integers(0, 100)))
def test_credit_is_the_greatest_total_ever_granted(totals: list[int]):
    allowance = Allowance()
    for total in totals:
        allowance.grant("audio", total)
    assert (allowance.total("audio"), allowance.total("text")) == (max(totals, default=0), 0)


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


CHUNKS = 1000
SOUND = {"samples_per_frame": CHUNKS, "chunk_samples": formulas.FRAMES_PER_ROW, "max_chunk": 1}
"""A token has CHUNKS chunks of sound."""


OPENED = stage_pb2.RunResponse(opened=stage_pb2.Opened(revisions=["7"]))


def batch(*chunks: stage_pb2.RunResponse) -> stage_pb2.RunResponse:
    return stage_pb2.RunResponse(chunks=chunk_pb2.Chunks(chunks=[message.chunk for message in chunks]))


async def test_a_link_takes_a_batch_as_its_chunks():
    peer = says(OPENED, chunk(0), batch(chunk(1), chunk(2), chunk(3, last=True)), ENDED)
    async with bare_peer(peer) as address, link_by(route_to(address), opening(checkpoints=["codes"])) as link:
        await link.open()
        assert [event.chunk.seq for event in await hear(link) if event.HasField("chunk")] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(batch(chunk(0), chunk(2)), id="a gap inside"),
        pytest.param(batch(chunk(0), chunk(1, last=True), chunk(2)), id="more after the last"),
        pytest.param(batch(*(chunk(seq) for seq in range(MAX_BATCH + 1))), id="too many"),
    ],
)
async def test_a_batch_is_checked_chunk_by_chunk(bad: stage_pb2.RunResponse):
    async with bare_peer(says(OPENED, bad, ENDED)) as address, link_by(route_to(address), opening(checkpoints=["codes"])) as link:
        await link.open()
        with pytest.raises(StageError) as refused:
            await hear(link)
    assert refused.value.reason == "PROTOCOL"


async def sent_to_a_stage(texts: Sequence[str], *, batches: bool) -> list[stage_pb2.RunRequest]:
    """The messages in which these pieces come down to a stage that grants credit when all of them wait. batches: the stage takes several
    chunks in one message."""
    seen: list[stage_pb2.RunRequest] = []

    async def stage(opened: stage_pb2.Open, context: Context) -> None:
        assert opened.batches
        await say(context, stage_pb2.RunResponse(opened=stage_pb2.Opened(batches=batches)))
        await say(context, stage_pb2.RunResponse(credit=stage_pb2.Credit(port="text", total=100)))
        while sum(map(len, map(pieces, seen))) < len(texts):
            seen.append(await heard(context))
        await say(context, chunk(0, last=True), ENDED)
        await listen(context)

    async with bare_peer(stage) as address, link_by(route_to(address), opening(checkpoints=["codes"])) as link:
        await link.open()
        for n, text in enumerate(texts):
            await link.feed.send(Output("text", 1, chunk_pb2.TextChunk(text=text, token_ids=[n]), last=n == len(texts) - 1))
        await hear(link)
    assert [piece.seq for message in seen for piece in pieces(message)] == list(range(len(texts)))
    return seen


def pieces(message: stage_pb2.RunRequest) -> Sequence[chunk_pb2.Chunk]:
    return message.chunks.chunks or ([message.chunk] if message.HasField("chunk") else [])


@pytest.mark.parametrize("batches", [True, False])
async def test_what_waited_for_credit_goes_down_together_to_a_stage_that_takes_it_so(batches: bool):
    seen = await sent_to_a_stage([str(n) for n in range(40)], batches=batches)
    assert [len(message.chunks.chunks) for message in seen if message.HasField("chunks")] == ([MAX_BATCH, 8] if batches else [])


async def test_a_large_chunk_is_a_message_of_its_own_between_small_ones():
    seen = await sent_to_a_stage(["x" * size for size in (10, 10, 900_000, 10, 10)], batches=True)
    assert [[piece.seq for piece in pieces(message)] for message in seen] == [[0, 1], [2], [3, 4]]


def test_no_message_of_a_router_is_beyond_the_bounds():
    sizes = [10, MAX_BATCH_BYTES // 2, MAX_BATCH_BYTES // 2, *[1] * (MAX_BATCH + 1), 2 * MAX_BATCH_BYTES, 1]
    pieces = [chunk_pb2.Chunk(port="audio", seq=n, audio=chunk_pb2.AudioChunk(data=bytes(size))) for n, size in enumerate(sizes)]
    together = list(batch_chunks(pieces, omni_pb2.GenerateResponse, together=True))
    assert [piece for message in together for piece in chunks_of(message)] == pieces
    assert [len(chunks_of(message)) for message in together] == [2, MAX_BATCH, 2, 1, 1]
    singly = list(batch_chunks(pieces, omni_pb2.GenerateResponse, together=False))
    assert [message.chunk for message in singly] == pieces


async def _ask(router: Local, *, batches: bool) -> tuple[WholeAnswer, int]:
    """Ask for an answer of three tokens of sound. Returns the answer, and in how many messages it came."""
    asked = request("batches", 3, thinker={"max_tokens": 3})
    asked.batches = batches
    answer, messages = WholeAnswer(), 0
    async with omni_stub(router.address) as stub:
        async for event in read_all(stub.Generate(asked, timeout=60)):
            answer.take(event)
            messages += 1
    return answer, messages


async def test_a_client_that_takes_batches_hears_the_same_in_fewer_messages():
    async with local_chain(SOUND) as stages, local_router({kind: stage.address for kind, stage in stages.items()}) as router:
        singly, messages_singly = await _ask(router, batches=False)
        together, messages_together = await _ask(router, batches=True)
        assert (singly.samples() == together.samples()).all() and len(singly.samples())
        assert singly.text() == together.text() and messages_singly > 3 * CHUNKS > messages_together
        async with AsyncOmni(address=router.address) as omni:
            heard = await omni.generate("batches", seed=3, max_tokens=3)
        assert heard.audio is not None and len(heard.audio.samples) == len(singly.samples())
        await all_free([stage.address for stage in stages.values()])
