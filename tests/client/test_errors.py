"""From a failed call to the exception that names it."""

import grpc
import pytest
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from omnistage.client import errors
from omnistage.client.errors import DETAILS_KEY, from_rpc_error
from omnistage.v1 import error_pb2


def failed(code: grpc.StatusCode, text: str, *details: Message, status_code: int | None = None) -> grpc.aio.AioRpcError:
    status = status_pb2.Status(code=code.value[0] if status_code is None else status_code, message=text)
    for detail in details:
        packed = Any()
        packed.Pack(detail)
        status.details.append(packed)
    trailing = grpc.aio.Metadata((DETAILS_KEY, status.SerializeToString()))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details=text)


def info(reason: str, **metadata: str) -> error_details_pb2.ErrorInfo:
    return error_details_pb2.ErrorInfo(reason=reason, domain="omnistage", metadata=metadata)


def test_overloaded_says_when_to_ask_again() -> None:
    retry = error_details_pb2.RetryInfo(retry_delay=Duration(seconds=1, nanos=500_000_000))
    error = from_rpc_error(failed(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", info("OVERLOADED"), retry))
    assert isinstance(error, errors.OverloadedError)
    assert error.retry_delay_s == 1.5
    assert error.reason == "OVERLOADED"


def test_bad_request_names_its_fields() -> None:
    violation = error_details_pb2.BadRequest.FieldViolation(field="thinker.max_tokens", description="must be 1 to 32768")
    detail = error_details_pb2.BadRequest(field_violations=[violation])
    error = from_rpc_error(failed(grpc.StatusCode.INVALID_ARGUMENT, "bad", info("BAD_REQUEST"), detail))
    assert isinstance(error, errors.BadRequestError)
    assert error.fields == (errors.FieldViolation("thinker.max_tokens", "must be 1 to 32768"),)


def test_stage_lost_names_the_stage() -> None:
    error = from_rpc_error(failed(grpc.StatusCode.UNAVAILABLE, "gone", info("STAGE_LOST", stage="talker")))
    assert isinstance(error, errors.StageLostError)
    assert error.stage == "talker"
    assert error.retry_delay_s is None


@pytest.mark.parametrize("name", [name for name, number in error_pb2.ErrorReason.items() if number])
def test_every_reason_of_the_contract_has_an_exception(name: str) -> None:
    reason = name.removeprefix("ERROR_REASON_")
    error = from_rpc_error(failed(grpc.StatusCode.UNKNOWN, "x", info(reason)))
    assert type(error) is errors.BY_REASON[reason]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.UnavailableError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineError),
        (grpc.StatusCode.CANCELLED, errors.UnavailableError),
        (grpc.StatusCode.UNIMPLEMENTED, errors.NotAvailableError),
        (grpc.StatusCode.INTERNAL, errors.UnavailableError),
        (grpc.StatusCode.DATA_LOSS, errors.ServerError),
        (grpc.StatusCode.NOT_FOUND, errors.UnknownModelError),
    ],
)
def test_without_details_the_status_code_decides(code: grpc.StatusCode, kind: type[errors.OmniError]) -> None:
    error = from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="text"))
    assert type(error) is kind
    assert str(error) == "text"


TOO_LARGE = "Received message larger than max (9437201 vs. 8388608)"


@pytest.mark.parametrize("details", [TOO_LARGE, f"SERVER: {TOO_LARGE}", "CLIENT: Sent message larger than max (9 vs. 8)"])
def test_a_request_that_is_too_large_is_not_to_be_asked_again(details: str) -> None:
    error = from_rpc_error(grpc.aio.AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.aio.Metadata(), grpc.aio.Metadata(), details))
    assert isinstance(error, errors.BadRequestError)
    assert [violation.field for violation in error.fields] == ["request"]
    assert details in str(error)
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "BAD_REQUEST")


def test_an_answer_that_is_too_large_is_no_mistake_of_the_request() -> None:
    details = f"Stream removed (CLIENT: {TOO_LARGE})"
    error = from_rpc_error(grpc.aio.AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.aio.Metadata(), grpc.aio.Metadata(), details))
    assert type(error) is errors.ProtocolError


def test_a_server_with_too_many_calls_is_overloaded() -> None:
    details = "Concurrent RPC limit exceeded!"
    error = from_rpc_error(grpc.aio.AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.aio.Metadata(), grpc.aio.Metadata(), details))
    assert type(error) is errors.OverloadedError


def test_an_overload_keeps_its_name_whatever_its_text_says() -> None:
    error = from_rpc_error(failed(grpc.StatusCode.RESOURCE_EXHAUSTED, f"full; {TOO_LARGE}", info("OVERLOADED")))
    assert type(error) is errors.OverloadedError


def test_details_that_contradict_the_status_are_not_believed() -> None:
    error = from_rpc_error(failed(grpc.StatusCode.UNAVAILABLE, "gone", info("BAD_REQUEST"), status_code=3))
    assert type(error) is errors.UnavailableError


def test_details_of_another_domain_are_not_ours() -> None:
    foreign = error_details_pb2.ErrorInfo(reason="OVERLOADED", domain="example.com")
    assert type(from_rpc_error(failed(grpc.StatusCode.UNAVAILABLE, "gone", foreign))) is errors.UnavailableError


def test_details_that_are_not_a_status_are_ignored() -> None:
    broken = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata((DETAILS_KEY, b"\xff\xff\xff")))
    assert type(from_rpc_error(broken)) is errors.UnavailableError


def test_a_deadline_is_a_timeout_error() -> None:
    assert issubclass(errors.DeadlineError, TimeoutError)


def test_every_error_of_the_tree_is_in_the_docstring() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.OmniError)]
    assert len(kinds) > 10
    for kind in kinds:
        assert kind.__name__ in (errors.__doc__ or "")
