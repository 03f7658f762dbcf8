"""Makes errors in OpenAI's form, {"error": {"message", "type", "param", "code"}}, with our reason and hint added. `fields_of` maps the
names of fields that the client library and the stages use to the names that an interface of the gateway uses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.responses import JSONResponse

from omnistage.client.errors import (
    BadRequestError,
    CancelledError,
    DeadlineError,
    NotAvailableError,
    NotSpokenError,
    OmniError,
    OverloadedError,
    ProtocolError,
    RequestError,
    RouterLostError,
    StageLostError,
    StalledError,
    StartingError,
    SupersededError,
    UnavailableError,
    UnknownModelError,
)
from omnistage.client.options import ABOUT, MEDIA, STAGES
from omnistage.client.wording import OPTION_OF, Wording, rename_field
from omnistage.host.errors import fault_found

INVALID, SERVER = "invalid_request_error", "server_error"

OLLAMA = "/api/"
"""The addresses below it are Ollama's, whose errors are a text."""

RETRY_AFTER_S = 1.0
"""Seconds to pause before a retry if the error gives no delay."""

MAX_CHARACTERS = 2048
"""The most characters of a message."""

REASONS = {400: "BAD_REQUEST", 413: "BAD_REQUEST", 415: "BAD_REQUEST", 431: "BAD_REQUEST", 500: "INTERNAL"}
"""By status: the reason of an error that is made without one; for other statuses the reason is the code."""

LIST = "GET /v1/models lists what there is."

HINTS: Mapping[type[OmniError], str] = {
    UnknownModelError: LIST,
    NotSpokenError: "Give words of a language that the voice speaks: signs and emoji alone have no sound.",
    OverloadedError: "Ask again after the stated delay.",
    StartingError: "It starts: ask again in a while.",
    StageLostError: "Ask again in a while.",
    RouterLostError: "Ask again: the same seed gives the same answer.",
    UnavailableError: "Ask again in a while.",
    DeadlineError: "Ask for less, such as fewer tokens or frames.",
    SupersededError: "",
    StalledError: "Read the answer as it comes.",
    ProtocolError: "Ask again. Router and gateway may be of different versions.",
}
"""Hints for clients over HTTP. They replace the client library's hints, which are for a program or for the person who runs the stack."""


KINDS: Mapping[type[Exception], tuple[int, str]] = {
    BadRequestError: (400, "invalid_value"),
    UnknownModelError: (404, "model_not_found"),
    NotAvailableError: (400, "unsupported"),
    NotSpokenError: (400, "not_spoken"),
    RequestError: (400, ""),
    DeadlineError: (503, "deadline"),
    UnavailableError: (503, ""),
    CancelledError: (409, ""),
    OmniError: (500, ""),
}
"""The status and the code for errors of the client library; an empty code: the error's reason, or else the name of its class, in
lower case."""


class ApiError(Exception):
    """An answer that is an error.

    status: the HTTP status. message: what is wrong, for people. param: the field that is wrong, as the client wrote it; None: no single
    field. code: the word that programs look for. reason: a name of `omnistage.v1.ErrorReason`; empty: REASONS has it by the status, or it
    is the code in capitals. hint: what to do. retry_after_s: seconds after which to ask again."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        reason: str = "",
        hint: str = "",
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        # The message and the hint may quote the request, which may hold half of a surrogate pair: JSON allows that and UTF-8 does not.
        self.message = _quote(message)
        self.param = param and _quote(param)
        self.status, self.code = status, code
        self.reason = reason or REASONS.get(status) or (code or "").upper()
        self.hint = hint
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["Retry-After"] = str(math.ceil(retry_after_s))

    @property
    def body(self) -> dict[str, Any]:
        """The error as JSON."""
        kind = SERVER if self.status >= 500 else INVALID
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
                "reason": self.reason,
                "hint": self.hint or None,
            }
        }

    def response_at(self, path: str) -> JSONResponse:
        """The response to a request for this path, in the form of its interface."""
        return JSONResponse(ollama_error(self) if is_ollama(path) else self.body, self.status, self.headers)


def is_ollama(path: str) -> bool:
    """Whether a path is of Ollama's interface. Below /api/v1 a client of OpenAI has a base URL with a word too many."""
    return path.startswith(OLLAMA) and not path.startswith(f"{OLLAMA}v1/")


def ollama_error(error: ApiError) -> dict[str, str]:
    """An error in Ollama's form, {"error": "..."}, which has no place for anything but a text."""
    end = "" if error.message.endswith(("?", ".")) else "."
    return {"error": f"{error.message}{end} {error.hint}" if error.hint else error.message}


def invalid(param: str, fault: str, hint: str = "") -> ApiError:
    """The error for a field with an impossible value."""
    return ApiError(400, f"{param}: {fault}", param=param, code="invalid_value", hint=hint)


def unsupported_error(param: str, reason: str) -> ApiError:
    """The error for a field that OpenAI's interface has and this one does not have. reason: the rest of the message."""
    return ApiError(400, f"{param}: {reason}", param=param, code="unsupported_parameter")


def unrecognized_error(param: str) -> ApiError:
    """The error for an unknown field, in OpenAI's words."""
    return ApiError(400, f"Unrecognized request argument supplied: {param}", param=param, code="unknown_parameter")


def of_omni(error: OmniError, fields: Mapping[str, str] | None = None) -> ApiError:
    """The ApiError for an error of the client library. fields: the caller's name of each field, by the library's name."""
    message = error.message or str(error)
    words = wording(fields or {})
    hint = next((HINTS[kind] for kind in type(error).__mro__ if kind in HINTS), error.advice)
    status, code = next(KINDS[kind] for kind in type(error).__mro__ if kind in KINDS)
    extra: dict[str, Any] = {"reason": error.reason, "hint": words.hint(hint)}
    match error:
        case BadRequestError():
            names = tuple(bad.field for bad in error.fields)
            extra["param"], message = words.name_of(names[0] if names else "") or None, words.message(message, names)
        case UnknownModelError():
            extra["param"] = "model"
        case NotSpokenError():
            extra["param"] = rename_field("text", fields or {})
            message = f"{extra['param']}: {message}"
        case DeadlineError():
            # A retry would take as long, so this header says to OpenAI's clients not to retry.
            extra |= {"reason": "DEADLINE", "retry_after_s": RETRY_AFTER_S, "headers": {"X-Should-Retry": "false"}}
        case UnavailableError():
            extra["retry_after_s"] = RETRY_AFTER_S if error.retry_delay_s is None else error.retry_delay_s
    code = code or (error.reason or type(error).__name__.removesuffix("Error")).lower()
    return ApiError(status, message, code=code, **extra)


def wording(fields: Mapping[str, str]) -> Wording:
    """The Wording of errors over HTTP. fields: as in `of_omni`."""
    return Wording({"pipelines": "GET /v1/models", **fields}, lambda name, value: f'"{name}": "{value}"')


def _quote(text: str) -> str:
    """The beginning of a text, without characters that UTF-8 cannot hold."""
    return text[:MAX_CHARACTERS].encode(errors="replace").decode()


def of_validation(error: RequestValidationError) -> ApiError:
    """The error for a body of the wrong form. It is about the first field that is missing, or else about the first fault."""
    # False is less than True, so a missing field of the body itself comes first.
    first = min(error.errors(), key=lambda fault: fault["type"] != "missing" or len(_place(fault)) != 1)
    path = _place(first)
    param = path_of(path)
    if first["type"] == "extra_forbidden":
        return unrecognized_error(param)
    if not path and first["type"] in ("json_invalid", "missing", "model_attributes_type", "dict_type"):
        hint = "Send JSON: Content-Type: application/json."
        return ApiError(400, "the body is no JSON object", code="invalid_json", hint=hint)
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
    return ApiError(400, f"{param}: {fault_found(first)}" if param else fault_found(first), param=param or None, code=code)


def _place(fault: Mapping[str, Any]) -> Sequence[object]:
    """The path of keys and indices to a fault that pydantic found, without its first word, such as "body"."""
    path: Sequence[object] = fault["loc"]
    return path[1:] if path and path[0] in ("body", "query", "path", "header") else path


def path_of(keys: Sequence[object]) -> str:
    """The path of a field: messages[0].content for ("messages", 0, "content")."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).removeprefix(".")


TEXT_NAMES = ("request", "text", "verbatim", "messages", "conversation")
"""The library's and the stages' names for the text of a request."""


def fields_of(endpoint: str, text_field: str, others: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """The interface's name of each field that an error of the library may name, by the library's name. endpoint: of the names that the
    contract has for its fields (About.http). text_field: the interface's name of the field with the text that is spoken, answered or drawn.
    others: the interface's name of each further field whose name differs."""
    named = {name: about.http[endpoint] for name, about in ABOUT.items() if endpoint in about.http}
    others = {**dict.fromkeys(TEXT_NAMES, text_field), "pipeline": "model", "outputs": "model", **named, **others}
    options = dict.fromkeys((*(name for name, about in ABOUT.items() if about.name), *MEDIA, *others))
    fields = {name: others.get(name, name) for name in options}
    for field, name in OPTION_OF.items():  # Errors have the full name in the contract, or its last part.
        interface_name = others.get(field, others.get(name, name))
        fields |= dict.fromkeys((field, field.rpartition(".")[2]), interface_name)
    # If a pipeline lacks a stage altogether, another pipeline has it, so the field to blame is the one that names the pipeline.
    return {**fields, **dict.fromkeys(STAGES, others["pipeline"])}
