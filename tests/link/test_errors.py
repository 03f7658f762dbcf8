"""The one table of reasons, and the forms an error takes on its way."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2

from omnistage.link.errors import ANOTHER_REPLICA, CODES, DOMAIN, StageError, bad_request, is_ok, protocol_error, status_code
from omnistage.v1 import error_pb2, stage_pb2

REASONS = [name.removeprefix("ERROR_REASON_") for name in error_pb2.ErrorReason.keys() if name != "ERROR_REASON_UNSPECIFIED"]  # noqa: SIM118


def test_every_reason_of_the_contract_has_a_code():
    assert set(CODES) == set(REASONS)
    assert set(REASONS) > ANOTHER_REPLICA


@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("delay", [None, 0.0, 0.5, 2.25])
@pytest.mark.parametrize("metadata", [{}, {"stage": "talker", "session_id": "s"}, {"field": "open.model"}])
def test_ended_and_status_say_what_the_error_says(reason: str, delay: float | None, metadata: dict[str, str]):
    error = StageError(reason, "what to do", metadata=metadata, retry_delay_s=delay)
    ended = error.ended()
    assert not is_ok(ended) and status_code(ended.code) is CODES[reason]

    back = StageError.from_ended(stage_pb2.Ended.FromString(ended.SerializeToString()))
    assert (back.reason, back.message, back.metadata, back.retry_delay_s, back.code) == (
        reason,
        "what to do",
        metadata,
        delay,
        CODES[reason],
    )
    assert back.ended() == ended

    status = back.status()
    assert (status.code, status.message) == (CODES[reason].value[0], "what to do")
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
    assert StageError.from_ended(error.ended()).code is grpc.StatusCode.INTERNAL


def test_a_reason_of_a_newer_version_keeps_its_name():
    error = StageError.from_ended(stage_pb2.Ended(code=8, reason="TOO_HOT", message="wait"))
    assert (error.reason, error.message, error.code) == ("TOO_HOT", "wait", grpc.StatusCode.INTERNAL)


def test_short_forms():
    assert bad_request("thinker.stop", "too many").metadata == {"field": "thinker.stop"}
    assert protocol_error("gap", port="codes").metadata == {"port": "codes"}
    assert is_ok(stage_pb2.Ended())
    assert status_code(14) is grpc.StatusCode.UNAVAILABLE and status_code(999) is grpc.StatusCode.UNKNOWN
