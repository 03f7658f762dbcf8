"""A session sends its chunks in order, one message at a time, and small chunks together where the stream is slower than their maker."""

from __future__ import annotations

import asyncio
import random
import weakref
from collections.abc import Sequence

import pytest
import structlog.testing

from omnistage.stage.caller import MAX_WAITING, Outbox
from omnistage.stage.outputs import CreditBehind
from omnistage.v1 import chunk_pb2, stage_pb2
from omnistage.wire.chunks import MAX_BATCH_BYTES
from omnistage.wire.errors import CallerGone, StageError
from omnistage.wire.limits import MAX_BATCH

KEEP = stage_pb2.RunResponse(keep=stage_pb2.Keep(port="hidden", first=3))


def chunk(seq: int, size: int = 4, port: str = "audio") -> stage_pb2.RunResponse:
    return stage_pb2.RunResponse(chunk=chunk_pb2.Chunk(port=port, seq=seq, count=1, audio=chunk_pb2.AudioChunk(data=bytes(size))))


def several(*seqs: int) -> stage_pb2.RunResponse:
    return stage_pb2.RunResponse(chunks=chunk_pb2.Chunks(chunks=[chunk(seq).chunk for seq in seqs]))


def shape(message: stage_pb2.RunResponse) -> object:
    """The numbers of a message's chunks, or what else it is."""
    match message.WhichOneof("event"):
        case "chunk":
            return message.chunk.seq
        case "chunks":
            return [chunk.seq for chunk in message.chunks.chunks]
    return message.WhichOneof("event")


def parts(message: stage_pb2.RunResponse) -> list[object]:
    """The same, one by one."""
    one = shape(message)
    return list(one) if isinstance(one, list) else [one]


class HeldStream:
    """A stream that takes a message only when it is told to."""

    def __init__(self, *, is_open: bool = False, error: Exception | None = None) -> None:
        self.written: list[stage_pb2.RunResponse] = []
        self.gate = asyncio.Event()
        self._error = error
        self._busy = False
        if is_open:
            self.gate.set()

    async def write(self, message: stage_pb2.RunResponse) -> None:
        assert not self._busy, "two writes at once"
        self._busy = True
        await self.gate.wait()
        self._busy = False
        if self._error is not None:
            raise self._error
        self.written.append(message)

    def shapes(self) -> Sequence[object]:
        return [shape(message) for message in self.written]


def outbox_on(wire: HeldStream, *, batches: bool = True) -> Outbox:
    outbox = Outbox(wire.write)
    outbox.batches = batches
    return outbox


async def begun(wire: HeldStream, *messages: stage_pb2.RunResponse, batches: bool = True) -> Outbox:
    """A write of chunk 0 is under way, and these messages wait for it."""
    outbox = outbox_on(wire, batches=batches)
    await outbox.put(chunk(0))
    await asyncio.sleep(0)
    for message in messages:
        await outbox.put(message)
    return outbox


async def let_go(wire: HeldStream, outbox: Outbox) -> Sequence[object]:
    """All that came out."""
    wire.gate.set()
    await outbox.flush()
    return wire.shapes()


async def test_a_stream_that_keeps_up_gets_each_chunk_by_itself():
    wire = HeldStream(is_open=True)
    outbox = outbox_on(wire)
    for seq in range(5):
        await outbox.put(chunk(seq))
        await outbox.flush()
    assert wire.shapes() == [0, 1, 2, 3, 4]


async def test_what_waits_for_a_write_goes_together_and_in_order():
    wire = HeldStream()
    outbox = await begun(wire, chunk(1), chunk(2, port="text"), KEEP, chunk(3), several(4, 5), chunk(6))
    assert await let_go(wire, outbox) == [0, [1, 2], "keep", [3, 4, 5, 6]]


async def test_a_caller_that_takes_one_chunk_a_message_gets_them_so_even_from_a_batch():
    wire = HeldStream()
    outbox = await begun(wire, chunk(1), several(2, 3), KEEP, batches=False)
    assert await let_go(wire, outbox) == [0, 1, 2, 3, "keep"]


async def test_batches_are_bounded_in_chunks_and_in_bytes():
    wire = HeldStream()
    full = [several(*range(1, MAX_BATCH)), chunk(MAX_BATCH)]
    outbox = await begun(wire, *full, chunk(MAX_BATCH + 1), chunk(MAX_BATCH + 2, MAX_BATCH_BYTES), chunk(MAX_BATCH + 3))
    assert await let_go(wire, outbox) == [0, list(range(1, MAX_BATCH + 1)), MAX_BATCH + 1, MAX_BATCH + 2, MAX_BATCH + 3]


async def test_a_fast_producer_waits_while_the_outbox_is_full():
    wire = HeldStream()
    outbox = await begun(wire, *map(chunk, range(1, MAX_WAITING + 1)))
    one_more = asyncio.create_task(outbox.put(chunk(MAX_WAITING + 1)))
    done, _ = await asyncio.wait({one_more}, timeout=0.05)
    assert not done
    wire.gate.set()
    await one_more
    await outbox.flush()
    assert [seq for message in wire.written for seq in parts(message)] == list(range(MAX_WAITING + 2))


async def test_a_flush_waits_for_what_was_put_before_it_and_not_for_what_others_put_meanwhile():
    wire = HeldStream(is_open=True)

    async def write(message: stage_pb2.RunResponse) -> None:
        await asyncio.sleep(0)
        await wire.write(message)

    outbox = Outbox(write)

    async def relay() -> None:
        while True:
            await outbox.put(KEEP)

    relaying = asyncio.create_task(relay())
    for seq in range(5):
        await outbox.put(chunk(seq))
        async with asyncio.timeout(30):
            await outbox.flush()
        assert seq in wire.shapes()
    relaying.cancel()


@pytest.mark.parametrize(("error", "told"), [(CallerGone(), CallerGone), (ValueError("a bug"), StageError)])
async def test_an_error_of_the_stream_reaches_whoever_puts_waits_or_flushes(error: Exception, told: type[Exception]):
    """A caller that has left is no bug; any other failure is one, and the log says so."""
    wire = HeldStream(error=error)
    outbox = await begun(wire, *map(chunk, range(1, MAX_WAITING + 1)))
    waiting = [asyncio.create_task(outbox.put(KEEP)), asyncio.create_task(outbox.flush())]
    await asyncio.sleep(0)
    with structlog.testing.capture_logs() as logs:
        wire.gate.set()
        for task in waiting:
            with pytest.raises(told):
                await task
    with pytest.raises(told):
        await outbox.put(KEEP)
    assert [entry["event"] for entry in logs] == ["outbox.bug"] * (told is StageError)


@pytest.mark.usefixtures("collected_by_hand")
async def test_an_error_of_the_stream_keeps_nothing_of_those_it_reached():
    wire = HeldStream(is_open=True, error=CallerGone())
    outbox = await begun(wire)

    async def told() -> weakref.ref[HeldStream]:
        of_the_session = HeldStream()
        with pytest.raises(CallerGone):
            await outbox.flush()
        return weakref.ref(of_the_session)

    assert (await told())() is None


async def test_after_cancel_nothing_is_written_and_nobody_waits():
    wire = HeldStream()
    outbox = await begun(wire, chunk(1))
    flushing = asyncio.create_task(outbox.flush())
    await asyncio.sleep(0)
    outbox.cancel()
    async with asyncio.timeout(10):
        await flushing
    wire.gate.set()
    await asyncio.sleep(0)
    assert wire.written == []


async def test_any_messages_over_any_stream_come_out_as_they_went_in(seed: int):
    rng = random.Random(seed)
    wire = HeldStream(is_open=True)

    async def write(message: stage_pb2.RunResponse) -> None:
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        await wire.write(message)

    outbox = Outbox(write)
    outbox.batches = True
    sent: list[object] = []
    for _ in range(2000):
        match rng.randrange(8):
            case 0:
                message = KEEP
            case 1:
                message = several(*range(len(sent), len(sent) + rng.randrange(2, 33)))
            case _:
                message = chunk(len(sent), rng.choice([0, 10, 5000, 40_000]))
        sent += parts(message)
        await outbox.put(message)
        if rng.random() < 0.02:
            await outbox.flush()
    await outbox.flush()
    assert [part for one in wire.written for part in parts(one)] == sent
    assert any(isinstance(one, list) for one in wire.shapes())


def test_the_end_of_a_port_without_credit_is_no_sign_of_credit() -> None:
    CreditBehind(["checkpoint"], ended_ports=["checkpoint", "audio"]).check()
    with pytest.raises(StageError, match="HALF_CLOSED"):
        CreditBehind(["checkpoint"], ended_ports=["checkpoint"]).check()
