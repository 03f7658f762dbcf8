"""Rows keep their element type, or are rounded as torch does it, and go out in bounded pieces; what comes in otherwise than its port says
is refused."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
import numpy as np
import pytest
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
from omnistage.stage.content import MAX_ROW_BYTES, pieces, row_outputs
from omnistage.stage.inputs import convert_rows
from omnistage.stage.logic import Input
from omnistage.v1 import chunk_pb2, stage_pb2, tensor_pb2
from omnistage.wire.errors import StageError

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
