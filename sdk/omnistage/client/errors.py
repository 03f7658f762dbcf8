"""All errors of the client, as one tree of exceptions.

::

    OmniError                  code, reason, hint, metadata, request_id, and notes with the hint and the request
    ├── RequestError           the request cannot be done as it was asked; asking again will not help
    │   ├── BadRequestError    fields: which field is bad and why
    │   ├── UnknownModelError  no such pipeline, model or voice
    │   ├── NotAvailableError  understood, but not offered on this platform or by this server
    │   └── NotSpokenError     nothing of the text could be spoken
    ├── UnavailableError       retry_delay_s: nobody answers there now; asking again later may help
    │   ├── OverloadedError    all places are taken
    │   ├── StartingError      pipeline: it is not ready yet
    │   ├── StageLostError     stage: a stage server is gone and no other one replaced it
    │   └── RouterLostError    the connection to the router broke, and the answer could not go on elsewhere
    ├── DeadlineError          the time limit passed (also a TimeoutError)
    ├── CancelledError         the answer was cancelled
    │   ├── SupersededError    the same request was asked again elsewhere
    │   └── StalledError       this client did not read for longer than the server waits
    ├── ProtocolError          a gap, a repeat or a cut in the stream: a bug, or a server of another version
    ├── ServerError            the server failed in a way that it did not expect
    ├── StackError             log: a private stack did not start, or ended
    ├── PlayerLostError        what played the sound ended or hung; the answer is whole
    ├── ClosedError            the client was closed before this call
    ├── ForkedError            this process was forked from one that had used the client
    └── WrongLoopError         called on an event loop that the client does not belong to, or on its own thread

Errors that a server reports come as `google.rpc.Status` in the trailing metadata: `ErrorInfo.reason` picks the class, `BadRequest` and
`RetryInfo` fill it. A status without our details comes from gRPC itself or from a proxy on the way: the code picks the class and the hint,
except for a message that gRPC found too large. A request whose status says only that it was cut off may be asked again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from omnistage.client.wording import PYTHON

M = TypeVar("M", bound=Message)

DETAILS_KEY = "grpc-status-details-bin"
DOMAIN = "omnistage"


class _Hint:
    """The attribute `hint` of an error: advice in Python's words; empty: there is none. Setting it also replaces the
    note of the exception. On a class: the hint of errors that are made without one."""

    def __get__(self, error: OmniError | None, kind: type[OmniError]) -> str:
        return PYTHON.hint(kind.ADVICE if error is None else error.advice)

    def __set__(self, error: OmniError, advice: str) -> None:
        """Set the hint, and replace the note. advice: the hint, still with `{NAME}` in place of names."""
        old_note = f"hint: {error.hint}"
        error.advice = advice
        other_notes = [note for note in getattr(error, "__notes__", ()) if note != old_note]
        # Assigned as a new list, because a copy of the exception shares the old list.
        error.__notes__ = [*other_notes, f"hint: {error.hint}"] if advice else other_notes


class OmniError(Exception):
    """The base of all errors. `hint` says what to do, in words of Python; it is also a note of the exception, so Python prints it with an
    uncaught one. `reason` is a name of `omnistage.v1.ErrorReason`, empty if no server gave one. `code` is the status code of gRPC, or None.
    `metadata` has further facts by name, such as the pipeline."""

    ADVICE: ClassVar[str] = ""
    """The class's hint, with `{NAME}` in place of names, which `wording` fills in."""

    hint = _Hint()
    request_id: str = ""
    """The name of the request in the logs of router and gateway, if a router was asked; otherwise empty."""
    answers: Sequence[Any] = ()
    """If this is the error of a list of texts: for each text its `Answer`, or None if that text failed."""

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        reason: str = "",
        code: grpc.StatusCode | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.code = code
        self.metadata = dict(metadata or {})
        self.advice = ""
        """The hint, still with `{NAME}` in place of names."""
        self.hint = hint or self.ADVICE

    def name_request(self, request_id: str) -> None:
        """Say which request this is about, in a note too. request_id: under which a router was asked."""
        self.request_id = request_id
        self.add_note(f"request: {request_id}")

    def say_more(self, sentence: str) -> None:
        """Append `sentence` to the message."""
        self.message = f"{self.message}; {sentence}"
        self.args = (self.message,)


class RequestError(OmniError):
    """The request cannot be done as it was asked; asking again will not help."""


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One bad field of a request. field: its name as the protos spell it. description: what is wrong with it."""

    field: str
    description: str


class BadRequestError(RequestError):
    """A field of the request is bad; `fields` says which."""

    fields: tuple[FieldViolation, ...] = ()

    @classmethod
    def of(cls, field: str, description: str) -> BadRequestError:
        """The error for one field that the client itself refuses to send. description: what is wrong with it."""
        error = cls(f"{field}: {description}", reason="BAD_REQUEST", code=grpc.StatusCode.INVALID_ARGUMENT)
        error.fields = (FieldViolation(field, description),)
        return error


class UnknownModelError(RequestError):
    """No such pipeline, model or voice."""

    ADVICE = "{pipelines} lists what this server offers."


class NotAvailableError(RequestError):
    """The request was understood, but this platform or this server cannot do it."""


class NotSpokenError(RequestError):
    """Nothing of the text could be spoken: the answer is complete and has no sound."""

    ADVICE = "Give words of a language that the voice speaks: signs and emoji alone have no sound."


class UnavailableError(OmniError):
    """No server answers there now. `retry_delay_s`: seconds after which the server suggests to ask again; None if it did not say."""

    ADVICE = "Check the address, and that `omnistage serve` runs there."
    retry_delay_s: float | None = None


class OverloadedError(UnavailableError):
    """All places are taken; ask again after `retry_delay_s` seconds."""

    ADVICE = "Ask again after the stated delay, or start more replicas (`omnistage serve --replicas STAGE=N`)."


class StartingError(UnavailableError):
    """The pipeline that was asked is not ready yet. `pipeline`: its name."""

    ADVICE = "It starts: ask again in a while. {servers} shows what is up; the log of `omnistage serve` says what did not start."

    @property
    def pipeline(self) -> str:
        return self.metadata.get("pipeline", "")


class StageLostError(UnavailableError):
    """A stage server is gone and no other one has replaced it. `stage`: its kind, empty if not known."""

    ADVICE = "{servers} shows which servers are up; ask again when the stage is back."

    @property
    def stage(self) -> str:
        return self.metadata.get("stage", "")


class RouterLostError(UnavailableError):
    """The connection to the router broke in the middle of an answer, and the answer could not go on elsewhere."""

    ADVICE = "Ask again: the same seed gives the same answer. Several routers can be named: {addresses}."


class DeadlineError(OmniError, TimeoutError):
    """The time limit passed before the answer was complete."""

    ADVICE = "Give more time: {timeout_s}."


class CancelledError(OmniError):
    """The answer was cancelled, here or by the server."""


class SupersededError(CancelledError):
    """The same request was asked again elsewhere, under its request id; the later call gets the answer."""

    ADVICE = "Give every request an id of its own, or none."


class StalledError(CancelledError):
    """This client did not read for longer than the server waits."""

    ADVICE = "Read the stream as it comes; do slow work in another thread or task."


class ProtocolError(OmniError):
    """A gap, a repeat or a cut in the stream. The client never passes over one without this error."""

    ADVICE = "Client and server may be of different versions; if they are not, please report it."


class ServerError(OmniError):
    """The server failed in a way that it did not expect."""

    ADVICE = "The server's log has the cause under the same session id."


class StackError(OmniError):
    """A private stack did not start, or ended. `log` holds the last lines of the process that failed."""

    log: str = ""


class PlayerLostError(OmniError):
    """The player of the sound could not be started, ended or hung. The answer goes on, unheard."""

    ADVICE = "OMNISTAGE_PLAYER names another player, or none for silence; the answer can be written to a file."


class ClosedError(OmniError):
    """The client was closed before this call."""

    ADVICE = "Make a new Omni, or ask before the `with` block ends."


class ForkedError(OmniError):
    """This process was forked from one that had used the client before. gRPC does not work in such a child, not even with a new client."""

    ADVICE = (
        "Make the first Omni in the child, after the fork, and none in the parent; or start the child without a fork: "
        "multiprocessing.get_context('spawn')."
    )


class WrongLoopError(OmniError):
    """Called where the client cannot wait: on another event loop than its own, or on the thread that runs its calls."""

    ADVICE = "Make one AsyncOmni for each event loop; call an Omni from threads of your own, not from a finalizer or a callback."


BY_REASON: Mapping[str, type[OmniError]] = {
    "BAD_REQUEST": BadRequestError,
    "UNKNOWN_MODEL": UnknownModelError,
    "OVERLOADED": OverloadedError,
    "PROTOCOL": ProtocolError,
    "CREDIT_EXCEEDED": ProtocolError,
    "HALF_CLOSED": ProtocolError,
    "STAGE_LOST": StageLostError,
    "REPLAY_EXPIRED": StageLostError,
    "STALE_REFERENCE": StageLostError,
    "REVISION_MISMATCH": StageLostError,
    "DRAINING": UnavailableError,
    "STARTING": StartingError,
    "DEADLINE": DeadlineError,
    "CLIENT_STALLED": StalledError,
    "SUPERSEDED": SupersededError,
    "UNAUTHENTICATED": RequestError,
}

HINTS: Mapping[str, str] = {
    "DRAINING": "That router is ending, or not ready yet. Ask again after the delay, or ask another router.",
}
"""Hints by reason, for reasons that need another hint than their class has."""

BY_CODE: Mapping[grpc.StatusCode, type[OmniError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: BadRequestError,
    grpc.StatusCode.OUT_OF_RANGE: BadRequestError,
    grpc.StatusCode.NOT_FOUND: UnknownModelError,
    grpc.StatusCode.UNIMPLEMENTED: NotAvailableError,
    grpc.StatusCode.FAILED_PRECONDITION: RequestError,
    grpc.StatusCode.PERMISSION_DENIED: RequestError,
    grpc.StatusCode.UNAUTHENTICATED: RequestError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.ABORTED: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.CANCELLED: UnavailableError,
    grpc.StatusCode.INTERNAL: UnavailableError,
    grpc.StatusCode.UNKNOWN: UnavailableError,
}
"""The class of a status without our details. The last three are gRPC's codes for a call that was cut off: gRPC reports a cancellation by
this client itself in another way."""

RETRY_HINT = "Ask again in a moment"
LOOK = "If it fails each time, look into the log of the router, or of the proxy in front of it."
OTHER = "A proxy in front of the router, or another server,"
UNSAID = f"Check the address and the request. {OTHER} refused the request and did not say which field is wrong."
REFUSED = f"Check the address. {OTHER} refused this call."

HINTS_BY_CODE: Mapping[grpc.StatusCode, str] = {
    grpc.StatusCode.CANCELLED: f"{RETRY_HINT}. A router with too much to do, or a proxy in front of it, cut the call off.",
    grpc.StatusCode.INTERNAL: f"{RETRY_HINT}. {LOOK}",
    grpc.StatusCode.UNKNOWN: f"{RETRY_HINT}. {LOOK}",
    grpc.StatusCode.ABORTED: f"{RETRY_HINT}.",
    grpc.StatusCode.RESOURCE_EXHAUSTED: f"{RETRY_HINT}. The router, or a proxy in front of it, takes no more calls now.",
    grpc.StatusCode.DATA_LOSS: f"{RETRY_HINT}.",
    grpc.StatusCode.NOT_FOUND: f"Check the address. {OTHER} does not know this call.",
    grpc.StatusCode.UNIMPLEMENTED: "Check the address. No router answered there, or one of an older version, or a proxy in front of it.",
    grpc.StatusCode.UNAUTHENTICATED: f"Check the key and the address. {OTHER} refused this call.",
    grpc.StatusCode.PERMISSION_DENIED: f"Check the key and the address. {OTHER} does not allow this call.",
    grpc.StatusCode.INVALID_ARGUMENT: UNSAID,
    grpc.StatusCode.OUT_OF_RANGE: UNSAID,
    grpc.StatusCode.FAILED_PRECONDITION: REFUSED,
    grpc.StatusCode.ALREADY_EXISTS: REFUSED,
}
"""Hints by code, for a status without our details whose class has no hint."""

RETRY_DELAY_S = 1.0
"""Seconds to pause before a retry of a call that was cut off or refused without a delay."""


TOO_LARGE = "larger than max"
"""Words in the text with which gRPC itself refuses a message; such a status has the code of a full server and no details."""

RECEIVED_HERE = "CLIENT: Received"
"""Words that this text has only if the server sent the message and this client refused it."""

BROKEN = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED})
"""Codes that gRPC reports when a connection dies or a call is reset. Which code comes depends on the work at that moment."""


def is_broken(error: grpc.aio.AioRpcError) -> bool:
    """True if the connection or the server is gone: the code is in `BROKEN`, and the status has no details of an omnistage server."""
    return error.code() in BROKEN and _unpack(_details_of(error), error_details_pb2.ErrorInfo).domain != DOMAIN


def says_when(error: grpc.aio.AioRpcError) -> bool:
    """Whether the server gives a delay after which to ask again."""
    return bool(_unpack(_details_of(error), error_details_pb2.RetryInfo).HasField("retry_delay"))


def from_rpc_error(error: grpc.aio.AioRpcError) -> OmniError:
    """The exception for a failed call: chosen by its reason, or by its status code if no omnistage server gave a reason."""
    status = _details_of(error)
    info = _unpack(status, error_details_pb2.ErrorInfo)
    is_ours = info.domain == DOMAIN  # An omnistage server gave a reason.
    if not is_ours and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and TOO_LARGE in (error.details() or ""):
        return _too_large(error)
    bad_request = _unpack(status, error_details_pb2.BadRequest)
    retry = _unpack(status, error_details_pb2.RetryInfo)
    reason = info.reason if is_ours else ""
    kind = BY_REASON.get(reason) or BY_CODE.get(error.code(), ServerError)
    fields = tuple(FieldViolation(violation.field, violation.description) for violation in bad_request.field_violations)
    message = status.message or error.details() or error.code().name
    if fields:
        message = PYTHON.message(message, tuple(bad.field for bad in fields))
    hint = HINTS.get(reason, "") if is_ours else HINTS_BY_CODE.get(error.code(), "")
    result = kind(message, hint=hint, reason=reason, code=error.code(), metadata=info.metadata)
    if isinstance(result, BadRequestError):
        result.fields = fields
    if isinstance(result, UnavailableError) and retry.HasField("retry_delay"):
        result.retry_delay_s = retry.retry_delay.ToTimedelta().total_seconds()
    elif isinstance(result, UnavailableError) and not is_ours:
        result.retry_delay_s = RETRY_DELAY_S
    return result


def _too_large(error: grpc.aio.AioRpcError) -> OmniError:
    """The error for a message that gRPC found too large. A retry does not help, unlike with a full server."""
    details = error.details() or ""
    if RECEIVED_HERE in details:
        return ProtocolError(details, code=error.code())
    result = BadRequestError.of("request", f"is larger than this router takes ({details}); send less text or smaller media")
    result.code = error.code()
    return result


def _unpack(status: status_pb2.Status, kind: type[M]) -> M:
    """The detail of one type from a status; an empty message of that type if there is none."""
    message = kind()
    for detail in status.details:
        if detail.Unpack(message):
            break
    return message


def _details_of(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    """The google.rpc.Status of a failed call; empty if there is none. gRPC demands that it has the code of the call; with another code it
    does not count."""
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                status = status_pb2.Status.FromString(value)
            except DecodeError:
                return status_pb2.Status()
            if status.code == error.code().value[0]:
                return status
    return status_pb2.Status()
