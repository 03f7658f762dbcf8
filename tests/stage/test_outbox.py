"""A session sends its chunks in order, one message at a time, and small chunks together where the stream is slow. Rows keep their element
type, or are rounded as torch does it, and go out in bounded pieces."""

from __future__ import annotations

import asyncio
import random
import weakref
from collections.abc import Sequence

import grpc
import numpy as np
import pytest
import structlog.testing
import torch
from numpy.typing import NDArray

from helpers.families import ITEMS, TOKENS
from helpers.run import PLENTY, row_chunks
from helpers.servers import family_logic, toy_logic
from helpers.stage import stage_with
from omnistage.connector.arena import Arena
from omnistage.connector.transport import Receiver, Sender
from omnistage.models.interface import Content, ElementType, PortSpec
from omnistage.models.text.engine_model import array_of
from omnistage.models.toy import formulas
from omnistage.stage.caller import MAX_WAITING, Outbox
from omnistage.stage.content import MAX_ROW_BYTES, pieces, row_outputs
from omnistage.stage.inputs import convert_rows
from omnistage.stage.logic import Input
from omnistage.stage.outputs import CreditBehind
from omnistage.v1 import chunk_pb2, stage_pb2, tensor_pb2
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


Array = NDArray[np.generic]
TYPES = [*ElementType]


def port(element_type: ElementType = ElementType.FLOAT32, width: int = 3) -> PortSpec:
    return PortSpec("rows", Content.TENSOR, width=width, element_type=element_type)


@pytest.mark.parametrize("element_type", TYPES, ids=lambda one: one.value)
@pytest.mark.parametrize("shared", [False, True], ids=["inline", "shared memory"])
def test_rows_of_every_element_type_arrive_as_they_were(element_type: ElementType, shared: bool) -> None:
    rows = (np.arange(30).reshape(10, 3) % 2).astype(element_type.dtype)
    (output,) = row_outputs(port(element_type), rows, last=True)
    arena = Arena.create(max_bytes=4 << 20, segment_bytes=1 << 20) if shared else None
    sender, receiver = Sender(arena, inline_limit=0), Receiver()
    sender.accept(receiver.answer(sender.offers()))
    (message,) = sender.pack(output.payload, element_type=output.element_type)  # type: ignore[arg-type]
    view = receiver.unpack(message)
    assert view is not None and (message.WhichOneof("place") == "shared_memory") == shared
    assert tensor_pb2.ElementType.Name(view.element_type) == f"ELEMENT_TYPE_{element_type.name}"
    np.testing.assert_array_equal(view.array, rows)
    assert view.array.dtype == element_type.dtype
    view.release()
    sender.close(clean=True)
    if arena is not None:
        arena.close()


@pytest.mark.parametrize(
    ("width", "count", "sizes"),
    [
        (1024, 256, [256]),
        (1024, 257, [256, 1]),
        (1024, 1000, [256, 256, 256, 232]),
        (1 << 18, 2, [1, 1]),
        (1 << 19, 2, [1, 1]),
        (1024, 0, [0]),
    ],
)
def test_long_rows_go_out_in_pieces_of_a_mebibyte(width: int, count: int, sizes: Sequence[int]) -> None:
    """One that is longer by itself goes alone; the end comes once."""
    outputs = list(row_outputs(port(width=width), np.zeros((count, width), np.float32), last=True))
    assert [output.count for output in outputs] == sizes
    assert [output.last for output in outputs] == [False] * (len(sizes) - 1) + [True]
    for output in outputs:
        if isinstance(output.payload, np.ndarray):
            assert output.payload.nbytes <= MAX_ROW_BYTES or output.count == 1


def test_nothing_that_is_not_the_end_is_nothing() -> None:
    assert list(row_outputs(port(), np.empty((0, 3), np.float32), last=False)) == []


@pytest.mark.parametrize("rows", [np.zeros((2, 4), np.float32), np.zeros((2, 3), np.float64), np.zeros(3, np.float32)])
def test_a_model_that_makes_other_rows_than_it_says_has_a_bug(rows: Array) -> None:
    with pytest.raises(TypeError, match=r"carries float32 \[n, 3\]"):
        list(row_outputs(port(), rows, last=False))


AUDIO = PortSpec("sound", Content.AUDIO, rate_hz=24000, width=1)
PCM = chunk_pb2.AUDIO_ENCODING_PCM16


async def taken(payload: chunk_pb2.AudioChunk | chunk_pb2.CodeChunk, spec: PortSpec, count: int) -> Array:
    async def one() -> object:
        yield Input(spec.name, 0, count, True, payload)

    (piece,) = [piece async for piece in pieces(one(), [spec])]  # type: ignore[arg-type]
    assert isinstance(piece.content, np.ndarray)
    return piece.content


async def test_sound_comes_in_as_floats() -> None:
    data = np.array([-32768, 0, 16384], "<i2").tobytes()
    chunk = chunk_pb2.AudioChunk(data=data, encoding=PCM, sample_rate_hz=24000, channel_count=1)
    assert (await taken(chunk, AUDIO, 3)).tolist() == [[-1.0], [0.0], [0.5]]


@pytest.mark.parametrize(
    ("sample", "reason"),
    [(12000.0, "is 12000, and full scale is 1: divide all by 32768"), (np.nan, "are no numbers"), (-np.inf, "are no numbers")],
)
async def test_samples_that_can_be_no_sound_are_refused(sample: float, reason: str) -> None:
    """Floats may be louder than full scale, as recordings are, and not as loud as whole numbers."""
    chunk = chunk_pb2.AudioChunk(encoding=chunk_pb2.AUDIO_ENCODING_FLOAT32, sample_rate_hz=24000, channel_count=1)
    chunk.data = np.array([0.5, -4.0, 1.5], "<f4").tobytes()
    assert (await taken(chunk, AUDIO, 3)).tolist() == [[0.5], [-4.0], [1.5]]
    chunk.data = np.array([0.5, sample, 1.5], "<f4").tobytes()
    with pytest.raises(StageError, match=reason) as told:
        await taken(chunk, AUDIO, 3)
    assert (told.value.reason, told.value.metadata["field"]) == ("BAD_REQUEST", "sound")


@pytest.mark.parametrize(
    "change", [{"sample_rate_hz": 16000}, {"channel_count": 2}, {"data": b"123"}, {"encoding": 0}], ids=lambda change: next(iter(change))
)
async def test_sound_that_is_not_as_the_port_says_is_refused(change: dict[str, int]) -> None:
    chunk = chunk_pb2.AudioChunk(**{"data": b"1234", "encoding": PCM, "sample_rate_hz": 24000, "channel_count": 1, **change})  # type: ignore[arg-type]
    with pytest.raises(StageError, match="24000 Hz") as refused:
        await taken(chunk, AUDIO, 2)
    assert refused.value.reason == "PROTOCOL"


def tensors(name: str, rows: Array, element_type: tensor_pb2.ElementType) -> list[chunk_pb2.Chunk]:
    """Rows as one chunk of a port."""
    (chunk,) = row_chunks(name, rows.astype(np.float32), [len(rows)])
    data = rows.tobytes()
    chunk.tensor.inline.data, chunk.tensor.inline.total_bytes, chunk.tensor.element_type = data, len(data), element_type
    return [chunk]


def speech(hidden: Array, element_type: tensor_pb2.ElementType) -> list[chunk_pb2.Chunk]:
    """The chunks that go into the Talker that hears prompts."""
    return [
        *tensors("prompt", formulas.prompt_rows(ITEMS), tensor_pb2.ELEMENT_TYPE_BFLOAT16),
        *tensors("places", ITEMS, tensor_pb2.ELEMENT_TYPE_INT64),
        *tensors("hidden", hidden, element_type),
    ]


@pytest.mark.parametrize("element_type", [tensor_pb2.ELEMENT_TYPE_INT16, tensor_pb2.ELEMENT_TYPE_INT32])
async def test_rows_of_another_type_are_refused_and_the_right_ones_are_spoken(element_type: tensor_pb2.ElementType) -> None:
    """The bits of one would fit: only the type tells."""
    rows = formulas.omni_rows(TOKENS)
    wrong = rows.astype(np.int32) if element_type == tensor_pb2.ELEMENT_TYPE_INT32 else rows
    async with stage_with(family_logic("toy-omni", "talker")) as stage:
        caller = await stage.opened()
        for chunk in speech(wrong, element_type):
            await caller.send(chunk=chunk)
        ended = await caller.expect("PROTOCOL", grpc.StatusCode.INVALID_ARGUMENT)
        assert "BFLOAT16 [24, 8] was expected" in ended.message
        heard = await stage.run(speech(rows, tensor_pb2.ELEMENT_TYPE_BFLOAT16))
        np.testing.assert_array_equal(heard.codes(), formulas.omni_frames(ITEMS, TOKENS))


async def test_rows_of_another_floating_type_are_heard_as_they_are() -> None:
    """Two neighbours may compute in unlike types."""
    rows = formulas.from_bfloat16(formulas.omni_rows(TOKENS)).astype(np.float32)
    async with stage_with(family_logic("toy-omni", "talker")) as stage:
        heard = await stage.run(speech(rows, tensor_pb2.ELEMENT_TYPE_FLOAT32))
        np.testing.assert_array_equal(heard.codes(), formulas.omni_frames(ITEMS, TOKENS))


async def test_a_stage_says_what_type_its_rows_have() -> None:
    said = family_logic("toy-omni", "thinker").description
    types = {port.name: tensor_pb2.ElementType.Name(port.element_type).removeprefix("ELEMENT_TYPE_") for port in said.produces}
    assert types == {"text": "UNSPECIFIED", "prompt": "BFLOAT16", "places": "INT64", "hidden": "BFLOAT16"}
    assert list(said.inputs) == ["text", "image", "audio"]
    assert stage_pb2.Payload.Name(family_logic("toy-film", "diffusion").description.produces[1].payload) == "PAYLOAD_VIDEO"


FLOATS = {
    tensor_pb2.ELEMENT_TYPE_FLOAT32: torch.float32,
    tensor_pb2.ELEMENT_TYPE_FLOAT16: torch.float16,
    tensor_pb2.ELEMENT_TYPE_BFLOAT16: torch.bfloat16,
}
AWKWARD = (0.0, -0.0, 1.0, np.inf, -np.inf, np.nan, 65504.0, 65519.9, 65520.0, 3.3895314e38, 1e-40, 1.00390625, 1.01171875)
"""Next to what the types can hold, and in the middle between two of bfloat16."""


@pytest.mark.parametrize("given", FLOATS)
@pytest.mark.parametrize("wanted", FLOATS)
def test_rows_are_rounded_as_torch_does_it(given: tensor_pb2.ElementType, wanted: tensor_pb2.ElementType, seed: int) -> None:
    bits = np.random.default_rng(seed).integers(0, 1 << 32, 40_000, np.uint32)
    rows = torch.cat((torch.tensor(AWKWARD), torch.from_numpy(bits.view(np.float32)))).to(FLOATS[given])[:, None]
    made = convert_rows(array_of(rows), given, wanted)
    expected = array_of(rows.to(FLOATS[wanted]))
    assert made.dtype == expected.dtype and made.shape == expected.shape
    none = rows.isnan().numpy()
    np.testing.assert_array_equal(made[~none], expected[~none])
    seen = torch.from_numpy(made.view(np.int16).copy()).view(torch.bfloat16) if made.dtype == np.uint16 else torch.from_numpy(made.copy())
    assert bool(seen[torch.from_numpy(none)].isnan().all())


ALL = slice(None)


@pytest.mark.parametrize(("place", "value"), [((2, 0), np.nan), ((1, -2), 3), ((ALL, -1), 1e6)], ids=["nan", "order", "length"])
async def test_rows_that_the_model_refuses_are_a_bad_request(place: tuple[int | slice, int], value: float) -> None:
    """Not INTERNAL: the caller can mend it."""
    logic = family_logic("smol", "code2wav")
    (port,) = logic.description.accepts
    rows = np.zeros((4, port.width), np.float32)
    rows[:, -2], rows[:, -1] = np.arange(4), 4
    rows[place] = value
    async with stage_with(logic) as stage:
        caller = await stage.opened()
        for chunk in row_chunks(port.name, rows, [4]):
            await caller.send(chunk=chunk)
        ended = await caller.expect("BAD_REQUEST", grpc.StatusCode.INVALID_ARGUMENT)
        assert ended.metadata["field"] == port.name


async def test_a_caller_that_half_closes_and_keeps_its_rows_does_not_hold_the_session() -> None:
    """No Release can come any more: the end of the stream gives the blocks back. Rows get credit after the answer to the offer, so that not
    all of them have gone inside messages by then."""
    logic = toy_logic("thinker", {"max_chunk": 1})
    async with stage_with(logic, arena_bytes=256 << 20, inline_limit=0) as stage:
        without_rows = {port.name: 0 if port.name == "hidden" else PLENTY for port in logic.description.produces}
        caller = await stage.begin(credits=without_rows)
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
