"""The one table of reasons, and the forms of an error on its way."""

from __future__ import annotations

import re
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2

from omnistage.client import call
from omnistage.link.channels import StreamLost
from omnistage.v1 import error_pb2, stage_pb2
from omnistage.wire.errors import DOMAIN, LOST_HERE, REASONS, StageError, bad_request, is_ok, protocol_error

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
    reopened = {name for name, reason in REASONS.items() if reason.reopens and not reason.behind}
    assert named_after("with a session that runs:") == reopened
    assert {name for name, reason in REASONS.items() if reason.behind} == {"STAGE_LOST"}
    assert LOST_HERE.another_replica and LOST_HERE.reopens and not LOST_HERE.behind


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
    assert set(call.NOT_YET) == {name for name, reason in REASONS.items() if reason.retry_delay_s is not None and not reason.behind}


@pytest.mark.parametrize("reason", NAMES)
@pytest.mark.parametrize("delay", [None, 0.0, 0.5, 2.25])
@pytest.mark.parametrize("metadata", [{}, {"stage": "talker", "session_id": "s"}, {"field": "open.model"}])
def test_ended_and_status_say_what_the_error_says(reason: str, delay: float | None, metadata: dict[str, str]):
    error = StageError(reason, "what to do", metadata=metadata, retry_delay_s=delay)
    delay = REASONS[reason].retry_delay_s if delay is None else delay
    ended = error.to_ended()
    assert not is_ok(ended) and ended.code == REASONS[reason].code.value[0]

    back = StageError.from_ended(stage_pb2.Ended.FromString(ended.SerializeToString()))
    assert (back.reason, back.message, back.metadata, back.retry_delay_s, back.code) == (
        reason,
        "what to do",
        metadata,
        delay,
        REASONS[reason].code,
    )
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
