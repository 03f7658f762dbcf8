"""The one table of reasons, the forms of an error on its way, and bytes that become a message only if it is within the limits."""

from __future__ import annotations

import random
import re
from pathlib import Path

import grpc
import pytest
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import wire
from helpers.mutation import changed
from helpers.run import messages
from omnistage.client import call
from omnistage.link.liveness import StreamLost
from omnistage.v1 import chunk_pb2, error_pb2, omni_pb2, stage_pb2, tensor_pb2
from omnistage.wire.errors import DOMAIN, LOST_HERE, REASONS, StageError, bad_request, is_ok, protocol_error
from omnistage.wire.limits import BYTES, COUNTS, FIELDS_AT_ONCE, MAX_FIELDS, TooLarge, decode

NAMES = [name.removeprefix("ERROR_REASON_") for name in error_pb2.ErrorReason.keys() if name != "ERROR_REASON_UNSPECIFIED"]  # noqa: SIM118
CONTRACT = Path(__file__).resolve().parents[2] / "protos" / "omnistage" / "v1" / "error.proto"
COMMENT = re.compile(r"(?m)^  // ([A-Z_]+)( \+ RetryInfo)?: .*\n(?:  // .*\n)*  ERROR_REASON_(\w+) = \d+;$")


def named_after(words: str) -> set[str]:
    """The reasons that the head of the contract lists after these words, up to what it says of streams without Ended."""
    head = CONTRACT.read_text(encoding="utf-8").partition("enum ")[0].replace("\n//", "")
    return set(re.findall(r"[A-Z_]{5,}", head.partition(words)[2].partition("a stream without")[0]))


def test_every_reason_of_the_contract_is_in_the_table():
    assert set(REASONS) == set(NAMES)


def test_the_comments_of_the_contract_say_what_the_table_says():
    said = {name: (code, bool(retry)) for code, retry, name in COMMENT.findall(CONTRACT.read_text(encoding="utf-8"))}
    assert said == {name: (reason.code.name, reason.retry_delay_s is not None) for name, reason in REASONS.items()}
    assert named_after("try another replica:") == {name for name, reason in REASONS.items() if reason.another_replica}
    reopened = {name for name, reason in REASONS.items() if reason.reopens and not reason.is_about_later_stage}
    assert named_after("with a session that runs:") == reopened
    assert {name for name, reason in REASONS.items() if reason.is_about_later_stage} == {"STAGE_LOST"}
    assert LOST_HERE.another_replica and LOST_HERE.reopens and not LOST_HERE.is_about_later_stage


def test_an_error_has_the_delay_of_the_table_unless_it_brings_one():
    assert StageError("DRAINING", "ends").retry_delay_s == REASONS["DRAINING"].retry_delay_s
    assert StageError("DRAINING", "ends", retry_delay_s=7.0).retry_delay_s == 7.0
    assert StageError("PROTOCOL", "gap").retry_delay_s is None
    lost = StreamLost("talker", "gone")
    assert (lost.reason, lost.retry_delay_s, lost.code) == ("STAGE_LOST", LOST_HERE.retry_delay_s, REASONS["STAGE_LOST"].code)


def test_an_error_from_another_process_has_the_delay_that_came_with_it_or_none():
    ended = StageError("DRAINING", "ends").to_ended()
    ended.ClearField("retry_delay")
    assert StageError.from_ended(ended).retry_delay_s is None


def test_a_client_waits_for_the_refusals_that_pass():
    delayed = {name for name, reason in REASONS.items() if reason.retry_delay_s is not None}
    assert set(call.NOT_YET) == {name for name in delayed if not REASONS[name].is_about_later_stage}


@pytest.mark.parametrize("reason", NAMES)
@pytest.mark.parametrize("delay", [None, 0.0, 0.5, 2.25])
@pytest.mark.parametrize("metadata", [{}, {"stage": "talker", "session_id": "s"}, {"field": "open.model"}])
def test_ended_and_status_say_what_the_error_says(reason: str, delay: float | None, metadata: dict[str, str]):
    error = StageError(reason, "what to do", metadata=metadata, retry_delay_s=delay)
    delay = REASONS[reason].retry_delay_s if delay is None else delay
    ended = error.to_ended()
    assert not is_ok(ended) and ended.code == REASONS[reason].code.value[0]

    back = StageError.from_ended(stage_pb2.Ended.FromString(ended.SerializeToString()))
    assert (back.reason, back.message, back.metadata) == (reason, "what to do", metadata)
    assert (back.retry_delay_s, back.code) == (delay, REASONS[reason].code)
    assert back.to_ended() == ended

    status = back.status()
    assert (status.code, status.message) == (REASONS[reason].code.value[0], "what to do")
    details = {detail.TypeName().rpartition(".")[2]: detail for detail in status.details}
    info, retry, bad = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo(), error_details_pb2.BadRequest()
    assert details["ErrorInfo"].Unpack(info)
    assert (info.reason, info.domain, dict(info.metadata)) == (reason, DOMAIN, metadata)
    assert ("RetryInfo" in details) == (delay is not None)
    if delay is not None:
        assert details["RetryInfo"].Unpack(retry) and retry.retry_delay.ToTimedelta().total_seconds() == delay
    assert ("BadRequest" in details) == ("field" in metadata)
    if "field" in metadata:
        assert details["BadRequest"].Unpack(bad)
        assert [(violation.field, violation.description) for violation in bad.field_violations] == [("open.model", "what to do")]


def test_a_bug_of_ours_is_internal_without_a_reason():
    error = StageError("", "oops")
    assert error.code is grpc.StatusCode.INTERNAL and str(error) == "INTERNAL: oops"
    assert StageError.from_ended(error.to_ended()).code is grpc.StatusCode.INTERNAL


def test_a_reason_of_a_newer_version_keeps_its_name():
    error = StageError.from_ended(stage_pb2.Ended(code=8, reason="TOO_HOT", message="wait"))
    assert (error.reason, error.message, error.code) == ("TOO_HOT", "wait", grpc.StatusCode.INTERNAL)


def test_short_forms():
    assert bad_request("thinker.stop", "too many").metadata == {"field": "thinker.stop"}
    assert protocol_error("gap", port="codes").metadata == {"port": "codes"} and is_ok(stage_pb2.Ended())


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
    parts = wire.field(1, wire.field(2, b"") * (COUNTS["ThinkerParams.messages"] // 2))
    for data in (wire.field(4, parts * 9), wire.field(4, parts) * 9):
        with pytest.raises(TooLarge, match=r"thinker\.messages\.parts"):
            await decode(data, omni_pb2.GenerateRequest)


async def test_a_request_of_many_fields_is_read_whole_and_one_of_too_many_is_not():
    history = COUNTS["Resume.history"]
    chunk = wire.field(2, wire.field(1, b"text") * (MAX_FIELDS // history - 2))
    for count in (FIELDS_AT_ONCE, history):
        data = wire.field(10, chunk * count)
        assert await decode(data, omni_pb2.GenerateRequest) == omni_pb2.GenerateRequest.FromString(data)
    with pytest.raises(TooLarge, match="fields in all"):
        await decode(wire.field(99, b"") * (MAX_FIELDS + 1), omni_pb2.GenerateRequest)


async def test_a_message_that_can_hold_little_is_passed_over_whole():
    """The fields of such a message are not counted, as docs/limits.md says."""
    data = wire.field(6, wire.field(99, b"") * (MAX_FIELDS + 1))
    assert (await decode(data, omni_pb2.GenerateRequest)).HasField("code2wav")


def some_messages() -> list[Message]:
    part = tensor_pb2.InlinePart(data=bytes(128), total_bytes=128)
    tensor = tensor_pb2.Tensor(element_type=tensor_pb2.ELEMENT_TYPE_FLOAT32, shape=[1, 32], inline=part, crc32c=7)
    text = chunk_pb2.TextChunk(text="a b", token_ids=[1, 1 << 31], logprobs=[-0.5, -1])
    codes = chunk_pb2.CodeChunk(codes=[1, 300, 70_000], codebook_count=3)
    place = stage_pb2.Position(port="text", seq=1 << 40, first=3, ended=True)
    resume = stage_pb2.Resume(positions=[place], history=[chunk_pb2.Chunk(port="text", count=2, text=text)])
    sampling = stage_pb2.Sampling(logit_bias={3: 1.0, 1 << 31: -1.0})
    thinker = stage_pb2.ThinkerParams(messages=messages("hi"), stop=["x"], sampling=sampling)
    params = stage_pb2.StageParams(thinker=thinker)
    route = [stage_pb2.Hop(addresses=["a:1", "b:2"], params=params)]
    return [
        omni_pb2.GenerateRequest(seed=(1 << 64) - 1, outputs=["text"], thinker=thinker, resume=resume, revisions=["1"]),
        stage_pb2.RunRequest(open=stage_pb2.Open(session_id="s", params=params, route=route, attempts=[0, 300], resume=resume)),
        stage_pb2.RunRequest(chunk=chunk_pb2.Chunk(port="hidden", count=1, tensor=tensor)),
        stage_pb2.RunRequest(chunk=chunk_pb2.Chunk(port="codes", count=1, codes=codes)),
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
        pytest.param(b"\x80" * 20 + b"\x01", id="tag"),
        pytest.param(b"\xff" * 1_000_000, id="tags"),
        pytest.param(b"\x08" + b"\xff" * 1_000_000, id="number"),
        pytest.param(wire.tag(4, wire.LENGTH) + wire.varint(1 << 40), id="length"),
        pytest.param(wire.tag(4, wire.LENGTH) + wire.varint(5) + b"\x0a\x7f", id="inside"),
        pytest.param(wire.tag(3, wire.VARINT), id="end"),
        pytest.param(wire.tag(9, wire.FIXED64) + b"123", id="fixed"),
        pytest.param(wire.tag(1000, 3) * 500_000 + wire.tag(1000, 4) * 500_000, id="groups"),
        pytest.param(wire.tag(1, 7), id="wire type"),
    ],
)
async def test_bytes_that_are_no_message_are_refused_at_once(data: bytes):
    with pytest.raises(DecodeError):
        await decode(data, omni_pb2.GenerateRequest)
