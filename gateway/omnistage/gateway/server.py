"""The gateway as a service of a process, and its app: every endpoint, with the guard in front of them."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp

from omnistage.client import __version__
from omnistage.client.errors import OmniError
from omnistage.gateway import audio, chat, films, page, pictures, responses, state
from omnistage.gateway.accounts import GatewayMetrics, HttpAccount
from omnistage.gateway.answering import BrokenOff
from omnistage.gateway.door import Door
from omnistage.gateway.failure import ApiError, of_omni, of_validation
from omnistage.gateway.guard import BUG, HttpGuard
from omnistage.gateway.port import HttpListener
from omnistage.gateway.settings import GatewaySettings
from omnistage.host import process
from omnistage.host.background import LastingTasks
from omnistage.host.token import GATEWAY_VARIABLE, Token, read_token
from omnistage.host.watchdog import Watched

log = structlog.get_logger(__name__)


class GatewayServer:
    """The gateway as `process.serve` runs it. It serves as soon as it listens; /ready says whether the router serves too."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self.lasting = LastingTasks()

    def bound(self, address: str) -> None:
        log.info("gateway.bound", address=address, router=self._door.settings.router, keys="any")

    async def start(self) -> None:
        """Start to listen, and go on with films that an earlier process left."""
        await self._door.open()
        self.lasting.start("omnistage-films", self._door.jobs.tidy())

    @property
    def threads(self) -> Sequence[Watched]:
        return ()

    async def drain(self, grace_s: float) -> None:
        """Give running requests up to `grace_s` seconds to end, and cancel films that nobody reads."""
        try:
            async with asyncio.timeout(grace_s):
                await self._door.jobs.end_unwatched()
                await self._door.idle()
        except TimeoutError:
            log.warning("drain.cut", answers=self._door.running)

    def fail(self) -> None:
        """Does nothing, because the listener breaks off the running answers."""

    async def close(self) -> None:
        await self.lasting.close()
        await self._door.close()


def _token(settings: GatewaySettings) -> Token | None:
    """The token that the gateway shows to the router: its own, which follows from the stack's if that is given. Raises StartError."""
    of_stack = read_token(settings.token_file, os.environ)
    return of_stack.for_gateway() if of_stack else read_token(settings.gateway_token_file, os.environ, GATEWAY_VARIABLE)


async def serve_gateway(settings: GatewaySettings, credentials: process.Credentials) -> None:
    """Serve until a signal stops the process. credentials: for calls between servers; HTTP clients have none. Raises StartError."""
    # These loggers have a line for every request and form that cannot be parsed, so any client could fill the log; the guard logs failures.
    for name in ("uvicorn.error", "python_multipart"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    metrics = GatewayMetrics()
    door = Door(settings, metrics, _token(settings))
    service = GatewayServer(door)
    listener = HttpListener(settings, new_app(door), door)
    await process.serve(settings, service, listener, metrics.registry, {"kind": "gateway", "model": ""})


LATER = {"/v1/audio/transcriptions": "transcription", "/v1/audio/translations": "translation", "/v1/realtime": "realtime"}
"""Endpoints of OpenAI that the gateway does not have yet, and their names in errors."""


def new_app(door: Door) -> ASGIApp:
    """The whole app: all endpoints, with the guard in front of them."""
    summary = "Omni-modality models behind OpenAI's interface."
    app = FastAPI(title="omnistage", version=__version__, summary=summary, openapi_url=None, redirect_slashes=False)
    for routes in (
        *(chat.routes, responses.routes, audio.speech_routes, audio.sound_routes, pictures.routes, films.routes),
        *(state.listing_routes, state.state_routes, page.routes),
    ):
        app.include_router(routes(door))
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _answer_invalid)
    app.add_exception_handler(ApiError, _answer_failure)
    app.add_exception_handler(OmniError, _answer_failure)
    app.add_exception_handler(Exception, _answer_bug)
    state.document(app)
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
    account.note_failure(error)
    return error.response
