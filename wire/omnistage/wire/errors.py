"""The one table of error reasons, and the exception that carries a reason through a server.

The code that finds an error raises `StageError`; the edge of the process turns it into `Ended` (on a `Run` stream) or into a
`google.rpc.Status` with `ErrorInfo`, `RetryInfo` and `BadRequest` (on every other call).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from omnistage.v1 import error_pb2, stage_pb2
from omnistage.wire.proto_values import duration

DOMAIN = "omnistage"

STATUS_DETAILS = "grpc-status-details-bin"
"""Trailing metadata with the google.rpc.Status of a call that failed."""

MAX_TEXT_BYTES = 1000
"""Largest size of an error's text, in bytes of UTF-8. The text travels in gRPC trailers, three times in all, and a client refuses more than
8 KiB of trailers."""


@dataclass(frozen=True, slots=True)
class Reason:
    """The meaning of a reason for its receiver.

    code: status of a call that ends with it. retry_delay_s: seconds after which asking again makes sense; None: never, or not by waiting.
    another_replica: one replica refuses a session for this reason; another one may take it. passes: the same replica may take it in a
    moment. reopens: a running session that ends with it can go on elsewhere. is_about_later_stage: a later stage of the route is in
    trouble, so `passes` and `reopens` hold only for a caller that can choose other replicas for that stage.
    """

    code: grpc.StatusCode
    another_replica: bool = False
    passes: bool = False
    reopens: bool = False
    is_about_later_stage: bool = False
    retry_delay_s: float | None = None


REASONS: Mapping[str, Reason] = {
    "BAD_REQUEST": Reason(grpc.StatusCode.INVALID_ARGUMENT),
    "UNKNOWN_MODEL": Reason(grpc.StatusCode.NOT_FOUND),
    "OVERLOADED": Reason(grpc.StatusCode.RESOURCE_EXHAUSTED, another_replica=True, retry_delay_s=1.0),
    "PROTOCOL": Reason(grpc.StatusCode.INVALID_ARGUMENT),
    "CREDIT_EXCEEDED": Reason(grpc.StatusCode.RESOURCE_EXHAUSTED),
    "HALF_CLOSED": Reason(grpc.StatusCode.FAILED_PRECONDITION),
    "STAGE_LOST": Reason(grpc.StatusCode.UNAVAILABLE, passes=True, reopens=True, is_about_later_stage=True, retry_delay_s=1.0),
    "REPLAY_EXPIRED": Reason(grpc.StatusCode.ABORTED, another_replica=True, reopens=True),
    "STALE_REFERENCE": Reason(grpc.StatusCode.ABORTED, another_replica=True, reopens=True),
    "REVISION_MISMATCH": Reason(grpc.StatusCode.FAILED_PRECONDITION, another_replica=True),
    "DRAINING": Reason(grpc.StatusCode.UNAVAILABLE, another_replica=True, passes=True, reopens=True, retry_delay_s=1.0),
    "DEADLINE": Reason(grpc.StatusCode.DEADLINE_EXCEEDED),
    "CLIENT_STALLED": Reason(grpc.StatusCode.CANCELLED),
    "SUPERSEDED": Reason(grpc.StatusCode.ABORTED),
    "UNAUTHENTICATED": Reason(grpc.StatusCode.UNAUTHENTICATED, another_replica=True),
    "STARTING": Reason(grpc.StatusCode.UNAVAILABLE, retry_delay_s=1.0),
}
"""Keys are names of `ErrorReason` without their prefix; error.proto says what each one is about."""

LOST_HERE = Reason(grpc.StatusCode.UNAVAILABLE, another_replica=True, passes=True, reopens=True, retry_delay_s=0.5)
"""STAGE_LOST if this process itself saw its stream break off, without Ended: the next stage is lost, not a later one."""

BUG = Reason(grpc.StatusCode.INTERNAL)
"""The meaning of an error without a reason, which is a bug of this program, and of a reason that this version does not know."""

assert set(REASONS) == {name.removeprefix("ERROR_REASON_") for name in error_pb2.ErrorReason.keys()} - {"UNSPECIFIED"}  # noqa: SIM118


class StageError(Exception):
    """An error with a reason from the table.

    For a limit of time use `calls.within`: an error raised in an `except TimeoutError` keeps the TimeoutError, which refers to the task,
    and so keeps the memory of the task until the collector runs.

    reason: a key of REASONS, or "" for a bug of ours (INTERNAL). metadata: as ErrorInfo.metadata (stage, session_id, field ...).
    retry_delay_s: seconds after which asking again makes sense; None: the table's value. The attribute is None if asking again never makes
    sense, or not by waiting.
    """

    def __init__(self, reason: str, message: str, *, metadata: Mapping[str, str] | None = None, retry_delay_s: float | None = None) -> None:
        message = _shorten(message)
        super().__init__(f"{reason or 'INTERNAL'}: {message}")
        self.reason = reason
        self.message = message
        self.metadata = dict(metadata or {})
        self.retry_delay_s = self.meaning.retry_delay_s if retry_delay_s is None else retry_delay_s

    @property
    def meaning(self) -> Reason:
        """The entry of this reason in the table."""
        return REASONS.get(self.reason, BUG)

    @property
    def code(self) -> grpc.StatusCode:
        return self.meaning.code

    def to_ended(self) -> stage_pb2.Ended:
        """The last message of a `Run` stream that ends with this error."""
        # The value of a gRPC status code is a pair: its number and its name.
        message = stage_pb2.Ended(code=self.code.value[0], reason=self.reason, message=self.message, metadata=self.metadata)
        if self.retry_delay_s is not None:
            message.retry_delay.CopyFrom(duration(self.retry_delay_s))
        return message

    def for_log(self) -> dict[str, str]:
        """The fields that a log may show: `reason`; the field or stage that it is about; and `message`, except for BAD_REQUEST and
        UNKNOWN_MODEL, which may quote the request."""
        fields = {"reason": self.reason or "INTERNAL"}
        if self.reason not in ("BAD_REQUEST", "UNKNOWN_MODEL"):
            fields["message"] = self.message
        return fields | {name: self.metadata[name] for name in ("field", "stage") if name in self.metadata}

    @classmethod
    def from_ended(cls, message: stage_pb2.Ended) -> StageError:
        """The error that a stage ended with, and its delay if it gave one. A reason that this version does not know keeps its name; its
        code is INTERNAL."""
        error = cls(message.reason, message.message, metadata=message.metadata)
        error.retry_delay_s = message.retry_delay.ToTimedelta().total_seconds() if message.HasField("retry_delay") else None
        return error

    def status(self) -> status_pb2.Status:
        """The error as google.rpc.Status, for unary and server-streaming calls."""
        details: list[any_pb2.Any] = [_pack(error_details_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN, metadata=self.metadata))]
        if self.retry_delay_s is not None:
            details.append(_pack(error_details_pb2.RetryInfo(retry_delay=duration(self.retry_delay_s))))
        if "field" in self.metadata:
            violation = error_details_pb2.BadRequest.FieldViolation(field=self.metadata["field"], description=self.message)
            details.append(_pack(error_details_pb2.BadRequest(field_violations=[violation])))
        return status_pb2.Status(code=self.code.value[0], message=self.message, details=details)


def _shorten(message: str) -> str:
    """Cut a message to MAX_TEXT_BYTES: a message that quotes a caller may have any length."""
    encoded = message.encode()
    # The dots at the end take 4 bytes.
    return message if len(encoded) <= MAX_TEXT_BYTES else encoded[: MAX_TEXT_BYTES - 4].decode(errors="ignore") + " ..."


def bad_request(field: str, description: str, **place: str) -> StageError:
    """The error of a bad field of a request; `field` in proto spelling. place: says which of several values is bad, such as port="x", as in
    omnistage.models.interface.BadRequest. It is separate from `field`, because clients have their own names for fields."""
    message = ": ".join([field, *(f"{name} {value}" for name, value in place.items()), description])
    return StageError("BAD_REQUEST", message, metadata={"field": field, **place})


def protocol_error(message: str, **metadata: str) -> StageError:
    """The error for a peer that broke the rules of a stream: a bug of the sender, never retried."""
    return StageError("PROTOCOL", message, metadata=metadata)


class CallerGone(Exception):
    """Nobody is at the other end of a call: it was cancelled, or its time is over. gRPC may report that only a moment later."""


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: StageError) -> NoReturn:
    """End a call with an error and its google.rpc.Status. Raises AbortError, or CallerGone."""
    details = error.status().SerializeToString()
    with suppress(grpc.aio.InternalError):
        await context.abort(error.code, error.message, trailing_metadata=((STATUS_DETAILS, details),))
        raise AssertionError("abort returns never")
    raise CallerGone


def is_ok(message: stage_pb2.Ended) -> bool:
    """Whether a stage ended without an error."""
    return bool(message.code == code_pb2.OK)


def _pack(message: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo | error_details_pb2.BadRequest) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
