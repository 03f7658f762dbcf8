"""The rules of the contract: one checker refuses what they exclude, and one copier loses no field."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Value

from omnistage.models.interface import DrawRequest, Sampling, SpeechRequest, TextRequest, WaveRequest
from omnistage.v1 import stage_pb2
from omnistage.wire.errors import StageError
from omnistage.wire.fields import check, descriptor_of, rule_of, values_for

DRAWING, THINKER, SAMPLING = stage_pb2.DiffusionParams, stage_pb2.ThinkerParams, stage_pb2.Sampling


@pytest.mark.parametrize(
    "message",
    [
        DRAWING(),
        DRAWING(steps=0, flow_shift=-0.0, negative_prompt=""),
        DRAWING(steps=1000, flow_shift=100, strength=1, sigmas=[1e6, 1e-6], options={"a": "b"}, frames_per_second=120),
        THINKER(stop=["x" * 256], sampling=SAMPLING(temperature=0, top_p=1, min_p=0.999, logit_bias={7: -100})),
        stage_pb2.Code2WavParams(profile="latency", encoding="AUDIO_ENCODING_FLOAT32"),
    ],
    ids=str,
)
def test_what_the_contract_allows_passes(message: Message) -> None:
    check(message)


@pytest.mark.parametrize(
    ("message", "refusal"),
    [
        (DRAWING(steps=1001), "steps: must be from 1 to 1000"),
        (DRAWING(flow_shift=-1), "flow_shift: must be above 0, at most 100"),
        (DRAWING(flow_shift=math.nan), "flow_shift: must be above 0, at most 100"),
        (DRAWING(guidance_scale=math.inf), "guidance_scale: must be from 0 to 100"),
        (DRAWING(guidance_scale=-math.inf), "guidance_scale: must be from 0 to 100"),
        (DRAWING(strength=0), "strength: must be above 0, at most 1"),
        (DRAWING(sigmas=[1, 0]), "sigmas: must be from 1e-06 to 1000000"),
        (DRAWING(negative_prompt="x" * 32001), "negative_prompt: must have at most 32000 characters"),
        (THINKER(stop=["a", "x" * 257]), "stop: must have at most 256 characters"),
        (THINKER(sampling=SAMPLING(min_p=1)), "sampling.min_p: must be from 0, below 1"),
        (THINKER(sampling=SAMPLING(logit_bias={7: 101})), "sampling.logit_bias: must be from -100 to 100"),
        (
            THINKER(messages=[stage_pb2.Message(role="user"), stage_pb2.Message(role="x")]),
            "messages.role: must be one of system, user, assistant",
        ),
        (stage_pb2.Code2WavParams(profile="slow"), "profile: must be one of latency, balanced, quality, offline"),
        (stage_pb2.Code2WavParams(encoding=99), "encoding: must be one of AUDIO_ENCODING_PCM16, AUDIO_ENCODING_FLOAT32"),  # type: ignore[arg-type]
    ],
    ids=str,
)
def test_what_the_contract_excludes_is_refused_by_name(message: Message, refusal: str) -> None:
    with pytest.raises(StageError) as refused:
        check(message, "params")
    assert (refused.value.reason, refused.value.message) == ("BAD_REQUEST", f"params.{refusal}")


def test_a_message_that_may_hold_itself_is_looked_at() -> None:
    check(Value(string_value="x"))


def test_an_absent_field_leaves_the_default_and_a_present_one_has_the_name_in_programs() -> None:
    assert values_for(DrawRequest, DRAWING(steps=0)) == {}
    message = DRAWING(duration_s=2, guidance_scale=0, sigmas=[1], options={"a": "b"})
    assert values_for(DrawRequest, message) == {"seconds": 2.0, "guidance_scale": 0.0, "sigmas": (1.0,), "options": {"a": "b"}}


@pytest.mark.parametrize(
    ("kind", "message", "elsewhere"),
    [
        (TextRequest, THINKER, set[str]()),
        (Sampling, SAMPLING, set[str]()),
        (SpeechRequest, stage_pb2.TalkerParams, {"markdown"}),
        (WaveRequest, stage_pb2.Code2WavParams, {"sample_rate_hz", "encoding"}),
        (DrawRequest, DRAWING, set[str]()),
    ],
)
def test_a_model_gets_every_option_but_those_that_its_stage_itself_obeys(kind: Any, message: type[Message], elsewhere: set[str]) -> None:
    options = {rule.option or field.name for field in descriptor_of(message).fields if (rule := rule_of(field)).text}
    assert options - {each.name for each in fields(kind)} == elsewhere


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        *((TextRequest, THINKER), (Sampling, SAMPLING), (SpeechRequest, stage_pb2.TalkerParams)),
        *((WaveRequest, stage_pb2.Code2WavParams), (DrawRequest, DRAWING)),
    ],
)
def test_no_value_is_lost_between_the_message_and_the_model(kind: Any, message: type[Message]) -> None:
    names = {each.name for each in fields(kind)}
    given, expected = message(), dict[str, Any]()
    for field in descriptor_of(message).fields:
        name = rule_of(field).option or field.name
        if name not in names or (field.message_type is not None and not field.message_type.GetOptions().map_entry):
            continue
        plain: Any = "word" if field.is_repeated else {str: "word", bool: True, int: 3, float: 0.5}[type(field.default_value)]
        if field.message_type is not None:
            entry: Any = {7: 0.5} if name == "logit_bias" else {"key": "word"}
            getattr(given, field.name).update(entry)
            expected[name] = entry
        elif field.is_repeated:
            element: Any = "word" if field.type == field.TYPE_STRING else 0.5
            getattr(given, field.name).append(element)
            expected[name] = (element,)
        else:
            setattr(given, field.name, plain)
            expected[name] = plain
    assert values_for(kind, given) == expected and expected
