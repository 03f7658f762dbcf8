"""Bytes become a message only if it is within the limits, and then it is the message that protobuf makes of them."""

from __future__ import annotations

import random

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import wire
from helpers.mutation import changed
from helpers.run import messages
from omnistage.v1 import chunk_pb2, omni_pb2, stage_pb2, tensor_pb2
from omnistage.wire import limits
from omnistage.wire.limits import BYTES, COUNTS, FIELDS_AT_ONCE, MAX_FIELDS, TooLarge, decode

REQUESTS: list[type[Message]] = [
    getattr(module, method.input_type.name)
    for module in (omni_pb2, stage_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
ROOTS = {kind.DESCRIPTOR.name: wire.root_of(kind) for kind in REQUESTS}
KINDS = {kind.DESCRIPTOR.name: kind for kind in REQUESTS}
REPEATED = [path for root in ROOTS.values() for path in wire.repeated(root)]
SIZED = [path for root in ROOTS.values() for path in wire.sized(root)]


def named(path: object) -> str:
    return f"{path.root.name}.{path}" if isinstance(path, wire.Path) else ""


def test_every_field_that_repeats_or_has_a_size_is_in_the_table():
    assert {path.full_name for path in REPEATED} == COUNTS.keys()
    assert {path.full_name for path in SIZED} == BYTES.keys() and len(REPEATED) > 50 and len(SIZED) > 10


@pytest.mark.parametrize("path", REPEATED, ids=named)
async def test_one_element_too_many_is_refused_by_name(path: wire.Path):
    most, kind = COUNTS[path.full_name], KINDS[path.root.name]
    assert await decode(path.times(most), kind) == kind.FromString(path.times(most))
    with pytest.raises(TooLarge) as raised:
        await decode(path.times(most + 1), kind)
    assert raised.value.field.endswith(path.field.name) and str(path).endswith(raised.value.field)
    assert str(most) in raised.value.description


@pytest.mark.parametrize("path", [path for path in REPEATED if path.field.cpp_type < 9], ids=named)
async def test_numbers_count_packed_or_not(path: wire.Path):
    most, kind = COUNTS[path.full_name], KINDS[path.root.name]
    few = min(most, 1000) // 2
    together = path.one_by_one(few) + path.times(most - few)
    assert await decode(together, kind) == kind.FromString(together)
    with pytest.raises(TooLarge):
        await decode(path.one_by_one(1) + path.times(most), kind)


@pytest.mark.parametrize("path", [path for path in SIZED if BYTES[path.full_name]], ids=named)
async def test_bytes_that_are_too_long_are_refused_by_name(path: wire.Path):
    size, kind = BYTES[path.full_name] or 0, KINDS[path.root.name]
    await decode(path.holding(wire.field(path.field.number, bytes(size))), kind)
    with pytest.raises(TooLarge) as raised:
        await decode(path.holding(wire.field(path.field.number, bytes(size + 1))), kind)
    assert raised.value.field.endswith(path.field.name)


async def test_parts_count_over_all_messages_of_a_request():
    """The parts also count if the singular field around them comes again and again: protobuf merges those."""
    parts = wire.field(1, wire.field(2, b"") * (limits.MAX_MESSAGES // 2))
    for data in (wire.field(4, parts * 9), wire.field(4, parts) * 9):
        with pytest.raises(TooLarge, match=r"thinker\.messages\.parts"):
            await decode(data, omni_pb2.GenerateRequest)


async def test_a_request_of_many_fields_is_read_whole_and_one_of_too_many_is_not():
    chunk = wire.field(2, wire.field(1, b"text") * (MAX_FIELDS // limits.MAX_HISTORY - 2))
    for count in (FIELDS_AT_ONCE, limits.MAX_HISTORY):
        data = wire.field(10, chunk * count)
        assert await decode(data, omni_pb2.GenerateRequest) == omni_pb2.GenerateRequest.FromString(data)
    with pytest.raises(TooLarge, match="fields in all"):
        await decode(wire.field(99, b"") * (MAX_FIELDS + 1), omni_pb2.GenerateRequest)


async def test_a_message_that_can_hold_little_is_passed_over_whole():
    """The fields of such a message are not counted, as docs/limits.md says."""
    data = wire.field(6, wire.field(99, b"") * (MAX_FIELDS + 1))
    assert (await decode(data, omni_pb2.GenerateRequest)).HasField("code2wav")


def some_messages() -> list[Message]:
    tensor = tensor_pb2.Tensor(
        element_type=tensor_pb2.ELEMENT_TYPE_FLOAT32,
        shape=[1, 32],
        inline=tensor_pb2.InlinePart(data=bytes(128), total_bytes=128),
        crc32c=7,
    )
    resume = stage_pb2.Resume(
        positions=[stage_pb2.Position(port="text", seq=1 << 40, first=3, ended=True)],
        history=[chunk_pb2.Chunk(port="text", count=2, text=chunk_pb2.TextChunk(text="a b", token_ids=[1, 1 << 31], logprobs=[-0.5, -1]))],
    )
    params = stage_pb2.StageParams(
        thinker=stage_pb2.ThinkerParams(
            messages=messages("hi"), stop=["x"], sampling=stage_pb2.Sampling(logit_bias={3: 1.0, 1 << 31: -1.0})
        )
    )
    opening = stage_pb2.Open(
        session_id="s", params=params, route=[stage_pb2.Hop(addresses=["a:1", "b:2"], params=params)], attempts=[0, 300], resume=resume
    )
    return [
        omni_pb2.GenerateRequest(seed=(1 << 64) - 1, outputs=["text"], thinker=params.thinker, resume=resume, revisions=["1"]),
        stage_pb2.RunRequest(open=opening),
        stage_pb2.RunRequest(chunk=chunk_pb2.Chunk(port="hidden", count=1, tensor=tensor)),
        stage_pb2.RunRequest(
            chunk=chunk_pb2.Chunk(port="codes", count=1, codes=chunk_pb2.CodeChunk(codes=[1, 300, 70_000], codebook_count=3))
        ),
        stage_pb2.RunRequest(release=tensor_pb2.Release(slots=[tensor_pb2.Slot(segment=1, offset=64, generation=9)])),
    ]


@settings(suppress_health_check=list(HealthCheck))
@given(message=st.sampled_from(some_messages()).flatmap(changed))
async def test_a_message_within_the_limits_is_read_as_it_was_written(message: Message):
    data = message.SerializeToString(deterministic=True)
    try:
        read = await decode(data, type(message))
    except TooLarge as error:
        assert error.field
        return
    assert read.SerializeToString(deterministic=True) == data


async def test_broken_bytes_are_read_as_protobuf_reads_them_or_not_at_all(seed: int):
    """The walk is never more lenient than protobuf: the message must hold nothing that the walk did not count. Groups, which the contract
    does not have, are refused."""
    chance = random.Random(seed)
    outcomes = {"read": 0, "refused": 0}
    for _ in range(20_000):
        message = chance.choice(some_messages())
        data = bytearray(message.SerializeToString())
        for _ in range(chance.randint(1, 3)):
            place = chance.randrange(len(data))
            match chance.randrange(3):
                case 0:
                    data[place] = chance.randrange(256)
                case 1:
                    del data[place:]
                    data.append(chance.randrange(256))
                case 2:
                    data[place:place] = chance.randbytes(chance.randint(1, 12))
        try:
            read = await decode(bytes(data), type(message))
        except (DecodeError, TooLarge):
            outcomes["refused"] += 1
            continue
        outcomes["read"] += 1
        for path in wire.repeated(wire.root_of(type(message))):
            assert _elements(read, path) <= COUNTS[path.full_name]
    assert min(outcomes.values()) > 1000, outcomes


def _elements(message: Message, path: wire.Path) -> int:
    """Count the elements of a field in a whole message."""
    here = [message]
    for each in path.around:
        inside = [getattr(one, each.name) for one in here if each.is_repeated or one.HasField(each.name)]
        here = [one for many in inside for one in many] if each.is_repeated else inside
    return sum(len(getattr(one, path.field.name)) for one in here)


@pytest.mark.parametrize(
    "data",
    [
        b"\x80" * 20 + b"\x01",
        b"\xff" * 1_000_000,
        b"\x08" + b"\xff" * 1_000_000,
        wire.tag(4, wire.LENGTH) + wire.varint(1 << 40),
        wire.tag(4, wire.LENGTH) + wire.varint(5) + b"\x0a\x7f",
        wire.tag(3, wire.VARINT),
        wire.tag(9, wire.FIXED64) + b"123",
        (wire.tag(1000, 3) * 500_000) + (wire.tag(1000, 4) * 500_000),
        wire.tag(1, 7),
    ],
    ids=["tag", "tags", "number", "length", "inside", "end", "fixed", "groups", "wire type"],
)
async def test_bytes_that_are_no_message_are_refused_at_once(data: bytes):
    with pytest.raises(DecodeError):
        await decode(data, omni_pb2.GenerateRequest)
