"""Makes the app: every endpoint, with the guard in front of them."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp

from omnistage.client import __version__
from omnistage.client.errors import OmniError
from omnistage.gateway import chat, drawn_sound, films, listing, page, pictures, responses, speech, state
from omnistage.gateway.account import HttpAccount
from omnistage.gateway.answering import BrokenOff
from omnistage.gateway.document import document
from omnistage.gateway.door import Door
from omnistage.gateway.failure import ApiError, of_omni, of_validation
from omnistage.gateway.guard import BUG, HttpGuard

LATER = {
    "/v1/audio/transcriptions": "transcription",
    "/v1/audio/translations": "translation",
    "/v1/realtime": "realtime",
}
"""Endpoints of OpenAI that the gateway does not have yet, and their names in errors."""


def new_app(door: Door) -> ASGIApp:
    """The whole app: all endpoints, with the guard in front of them."""
    summary = "Omni-modality models behind OpenAI's interface."
    app = FastAPI(title="omnistage", version=__version__, summary=summary, openapi_url=None, redirect_slashes=False)
    for endpoints in (chat, responses, speech, drawn_sound, pictures, films, listing, state, page):
        app.include_router(endpoints.routes(door))
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _answer_invalid)
    app.add_exception_handler(ApiError, _answer_failure)
    app.add_exception_handler(OmniError, _answer_failure)
    app.add_exception_handler(Exception, _answer_bug)
    document(app)
    return HttpGuard(app, door)


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _answer_error(request, of_validation(error))


async def _answer_failure(request: Request, error: Exception) -> Response:
    if isinstance(error, OmniError):
        return _answer_error(request, of_omni(error))
    assert isinstance(error, ApiError)
    return _answer_error(request, error)


async def _answer_bug(request: Request, error: Exception) -> Response:
    """Answer an error that no code expected. Starlette then raises the error, and the guard sees it."""
    if isinstance(error, ClientDisconnect | BrokenOff):  # The client has left or was cut off, so nobody reads an answer.
        return Response(status_code=499)
    return _answer_error(request, BUG)


async def _answer_invalid(request: Request, error: Exception) -> Response:
    """Answer requests that FastAPI itself refuses."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    later = next((name for prefix, name in LATER.items() if path == prefix or path.startswith(f"{prefix}/")), None)
    if error.status_code == 404 and later is not None:
        return _answer_error(request, ApiError(404, f"{later} is not offered yet", code="not_offered"))
    if error.status_code == 404:
        return _answer_error(request, ApiError(404, f"Unknown request URL: {request.method} {path[:256]}", code="unknown_url"))
    if error.status_code == 405:
        headers = dict(error.headers or {})
        return _answer_error(
            request, ApiError(405, f"{request.method} is not for {path[:256]}", code="method_not_supported", headers=headers)
        )
    return _answer_error(request, ApiError(error.status_code, str(error.detail), code="invalid_body"))


def _answer_error(request: Request, error: ApiError) -> Response:
    """Note the error in the account, and return its response."""
    account: HttpAccount = request.state.account
    account.failed(error)
    return error.response
