"""The one table of error reasons, and the exception that carries a reason through a server.

Whoever finds an error raises `StageError`; the edge of the process turns it into `Ended` (on a `Run` stream) or into a
`google.rpc.Status` with `ErrorInfo`, `RetryInfo` and `BadRequest` (on every other call).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from omnistage.link.durations import duration
from omnistage.v1 import error_pb2, stage_pb2

DOMAIN = "omnistage"

STATUS_DETAILS = "grpc-status-details-bin"
"""Trailing metadata with the google.rpc.Status of a call that failed."""

MAX_TEXT_BYTES = 1000
"""Of an error, in UTF-8: it travels in gRPC trailers, three times in all, and a client refuses more than 8 KiB of those."""

CODES: Mapping[str, grpc.StatusCode] = {
    "BAD_REQUEST": grpc.StatusCode.INVALID_ARGUMENT,
    "UNKNOWN_MODEL": grpc.StatusCode.NOT_FOUND,
    "OVERLOADED": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "PROTOCOL": grpc.StatusCode.INVALID_ARGUMENT,
    "CREDIT_EXCEEDED": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "HALF_CLOSED": grpc.StatusCode.FAILED_PRECONDITION,
    "STAGE_LOST": grpc.StatusCode.UNAVAILABLE,
    "REPLAY_EXPIRED": grpc.StatusCode.ABORTED,
    "STALE_REFERENCE": grpc.StatusCode.ABORTED,
    "REVISION_MISMATCH": grpc.StatusCode.FAILED_PRECONDITION,
    "DRAINING": grpc.StatusCode.UNAVAILABLE,
    "DEADLINE": grpc.StatusCode.DEADLINE_EXCEEDED,
    "CLIENT_STALLED": grpc.StatusCode.CANCELLED,
    "SUPERSEDED": grpc.StatusCode.ABORTED,
    "UNAUTHENTICATED": grpc.StatusCode.UNAUTHENTICATED,
}
"""Status code of each `ErrorReason`; error.proto says what each one means."""

ANOTHER_REPLICA = frozenset({"OVERLOADED", "REPLAY_EXPIRED", "STALE_REFERENCE", "REVISION_MISMATCH", "DRAINING", "UNAUTHENTICATED"})
"""Reasons for which the next address may well succeed."""

_STATUS_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}

assert set(CODES) == {name.removeprefix("ERROR_REASON_") for name in error_pb2.ErrorReason.keys()} - {"UNSPECIFIED"}  # noqa: SIM118


class StageError(Exception):
    """An error with a reason from the table.

    reason: a key of CODES, or "" for a bug of ours (INTERNAL). metadata: as ErrorInfo.metadata (stage, session_id, field ...).
    retry_delay_s: seconds after which asking again makes sense; None where it does not.
    """

    def __init__(self, reason: str, message: str, *, metadata: Mapping[str, str] | None = None, retry_delay_s: float | None = None) -> None:
        message = _shortened(message)
        super().__init__(f"{reason or 'INTERNAL'}: {message}")
        self.reason = reason
        self.message = message
        self.metadata = dict(metadata or {})
        self.retry_delay_s = retry_delay_s

    @property
    def code(self) -> grpc.StatusCode:
        return CODES.get(self.reason, grpc.StatusCode.INTERNAL)

    def ended(self) -> stage_pb2.Ended:
        """The last message of a `Run` stream that ends with this error."""
        ended = stage_pb2.Ended(code=self.code.value[0], reason=self.reason, message=self.message, metadata=self.metadata)
        if self.retry_delay_s is not None:
            ended.retry_delay.CopyFrom(duration(self.retry_delay_s))
        return ended

    @classmethod
    def from_ended(cls, ended: stage_pb2.Ended) -> StageError:
        """The error that a stage ended with. A reason that this version does not know keeps its name; its code is INTERNAL."""
        delay = ended.retry_delay.ToTimedelta().total_seconds() if ended.HasField("retry_delay") else None
        return cls(ended.reason, ended.message, metadata=ended.metadata, retry_delay_s=delay)

    def status(self) -> status_pb2.Status:
        """The error as google.rpc.Status, for unary and server-streaming calls."""
        details: list[any_pb2.Any] = [_packed(error_details_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN, metadata=self.metadata))]
        if self.retry_delay_s is not None:
            details.append(_packed(error_details_pb2.RetryInfo(retry_delay=duration(self.retry_delay_s))))
        if "field" in self.metadata:
            violation = error_details_pb2.BadRequest.FieldViolation(field=self.metadata["field"], description=self.message)
            details.append(_packed(error_details_pb2.BadRequest(field_violations=[violation])))
        return status_pb2.Status(code=self.code.value[0], message=self.message, details=details)


def _shortened(message: str) -> str:
    """Most messages as they are; one that quotes what a caller sent may be of any length."""
    encoded = message.encode()
    return message if len(encoded) <= MAX_TEXT_BYTES else encoded[: MAX_TEXT_BYTES - 4].decode(errors="ignore") + " ..."


def bad_request(field: str, description: str) -> StageError:
    """A bad field of a request; `field` in proto spelling."""
    return StageError("BAD_REQUEST", f"{field}: {description}", metadata={"field": field})


def protocol_error(message: str, **metadata: str) -> StageError:
    """The other end broke the rules of `Run`: a bug of the sender, never retried."""
    return StageError("PROTOCOL", message, metadata=metadata)


def status_code(number: int) -> grpc.StatusCode:
    """The gRPC status of a number on the wire; an unknown one is UNKNOWN."""
    return _STATUS_BY_NUMBER.get(number, grpc.StatusCode.UNKNOWN)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: StageError) -> NoReturn:
    """End a call with an error and its google.rpc.Status."""
    details = error.status().SerializeToString()
    await context.abort(error.code, error.message, trailing_metadata=((STATUS_DETAILS, details),))
    raise AssertionError("abort returns never")


def is_ok(ended: stage_pb2.Ended) -> bool:
    return bool(ended.code == code_pb2.OK)


def _packed(message: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo | error_details_pb2.BadRequest) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
