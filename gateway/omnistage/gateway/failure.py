"""What went wrong, in OpenAI's form: {"error": {"message", "type", "param", "code"}}, and beside these our reason and hint."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.responses import JSONResponse

from omnistage.client.errors import (
    BadRequestError,
    CancelledError,
    DeadlineError,
    NotAvailableError,
    OmniError,
    RequestError,
    UnavailableError,
    UnknownModelError,
)

INVALID, SERVER = "invalid_request_error", "server_error"

RETRY_AFTER_S = 1.0
"""Where nobody said when to ask again."""

MOST_CHARACTERS = 2048
"""Of a message."""


class ApiError(Exception):
    """An answer that is an error.

    status: of HTTP. message: what is wrong, for people. param: the field that is wrong, as the client wrote it; None: no single one. code:
    what programs look for. reason: the name in `omnistage.v1.ErrorReason`. hint: what to do. retry_after_s: when to ask again.
    """

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
        # Both may quote the request, in which half of a pair may stand, which JSON can say and UTF-8 cannot.
        self.message = _quoted(message)
        self.param = param and _quoted(param)
        self.status, self.code = status, code
        self.reason, self.hint = reason, hint
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["Retry-After"] = str(math.ceil(retry_after_s))

    @property
    def body(self) -> dict[str, Any]:
        """The JSON that says it."""
        kind = SERVER if self.status >= 500 else INVALID
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
                "reason": self.reason or None,
                "hint": self.hint or None,
            }
        }

    @property
    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


def of_omni(error: OmniError, fields: Mapping[str, str] | None = None) -> ApiError:
    """An error of the client library. fields: by a field as the library calls it, what the caller knows it by."""
    message = error.message or str(error)
    if isinstance(error, BadRequestError):
        field = error.fields[0].field if error.fields else ""
        param = _renamed(field, fields or {})
        if param != field:
            message = message.replace(field, param, 1)
        return ApiError(400, message, param=param or None, code="invalid_value", reason=error.reason, hint=error.hint)
    if isinstance(error, UnknownModelError):
        return ApiError(404, message, param="model", code="model_not_found", reason=error.reason, hint=error.hint)
    if isinstance(error, NotAvailableError):
        return ApiError(400, message, code="unsupported", reason=error.reason, hint=error.hint)
    if isinstance(error, RequestError):
        return ApiError(400, message, code=_code(error), reason=error.reason, hint=error.hint)
    if isinstance(error, DeadlineError):
        # Asked again it would take as long: OpenAI's clients are told not to.
        again = {"X-Should-Retry": "false"}
        return ApiError(503, message, code="deadline", reason="DEADLINE", hint=error.hint, retry_after_s=RETRY_AFTER_S, headers=again)
    if isinstance(error, UnavailableError):
        after_s = RETRY_AFTER_S if error.retry_delay_s is None else error.retry_delay_s
        return ApiError(503, message, code=_code(error), reason=error.reason, hint=error.hint, retry_after_s=after_s)
    if isinstance(error, CancelledError):
        return ApiError(409, message, code=_code(error), reason=error.reason, hint=error.hint)
    return ApiError(500, message, code=_code(error), reason=error.reason, hint=error.hint)


@contextmanager
def in_words_of(fields: Mapping[str, str]) -> Iterator[None]:
    """Errors of the client library become those of this interface. fields: as of `of_omni`."""
    try:
        yield
    except OmniError as error:
        raise of_omni(error, fields) from error


def _quoted(text: str) -> str:
    return text[:MOST_CHARACTERS].encode(errors="replace").decode()


def _code(error: OmniError) -> str:
    return (error.reason or type(error).__name__.removesuffix("Error")).lower()


def _renamed(field: str, fields: Mapping[str, str]) -> str:
    """The field as the caller wrote it: by its longest beginning that has another name."""
    for name in sorted(fields, key=len, reverse=True):
        if field == name or field.startswith((f"{name}.", f"{name}[")):
            return fields[name] + field[len(name) :]
    return field


def of_validation(error: RequestValidationError) -> ApiError:
    """A body that is not of the form that is asked for: its first fault."""
    first = error.errors()[0]
    where = first["loc"][1:] if first["loc"] and first["loc"][0] in ("body", "query", "path", "header") else first["loc"]
    param = path_of(where)
    if first["type"] == "extra_forbidden":
        return ApiError(
            400, f"Unrecognized request argument supplied: {param}", param=param, code="unknown_parameter", reason="BAD_REQUEST"
        )
    if not where and first["type"] in ("json_invalid", "missing", "model_attributes_type", "dict_type"):
        return ApiError(
            400, "the body is no JSON object", code="invalid_json", reason="BAD_REQUEST", hint="Send JSON: Content-Type: application/json."
        )
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
    return ApiError(400, f"{param}: {first['msg']}" if param else first["msg"], param=param or None, code=code, reason="BAD_REQUEST")


def path_of(where: Sequence[object]) -> str:
    """messages[0].content, of ("messages", 0, "content")."""
    path = ""
    for part in where:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path
