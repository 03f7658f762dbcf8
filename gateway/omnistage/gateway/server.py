"""The gateway as a service of a process, and its app: every endpoint, with the guard in front of them."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from difflib import get_close_matches

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp

from omnistage.client import __version__
from omnistage.client.errors import OmniError
from omnistage.gateway import audio, chat, completions, films, ollama, page, pictures, responses, state
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
        """Go on with films that an earlier process left."""
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


ENDPOINTS = (chat, completions, responses, audio, pictures, films, ollama, state, page)
"""The modules of all endpoints."""

LATER = {"/v1/audio/transcriptions": "transcription", "/v1/audio/translations": "translation", "/v1/realtime": "realtime"}
"""Endpoints of OpenAI that the gateway does not have yet, and their names in errors."""


def new_app(door: Door) -> ASGIApp:
    """The whole app: all endpoints, with the guard in front of them."""
    summary = "Omni-modality models behind the interfaces of OpenAI and Ollama."
    app = FastAPI(title="omnistage", version=__version__, summary=summary, openapi_url=None, redirect_slashes=False)
    app.state.door = door
    for endpoints in ENDPOINTS:
        app.include_router(endpoints.router)
    for kind in (RequestValidationError, HTTPException, ApiError, OmniError, Exception):
        app.add_exception_handler(kind, _answer_error)
    state.document(app)
    return HttpGuard(app, door)


async def _answer_error(request: Request, error: Exception) -> Response:
    """Note an error in the account of its request, and return its response. For an error that no code expected Starlette then raises it
    again, and the guard sees it."""
    account: HttpAccount = request.state.account
    if isinstance(error, BrokenOff):  # The connection is broken off, so nobody reads an answer.
        return Response(status_code=499)
    failure = _failure_of(error, request, account.fields)
    account.note_failure(failure)
    return failure.response_at(request.scope["path"])


def _failure_of(error: Exception, request: Request, fields: Mapping[str, str]) -> ApiError:
    """The answer to a request that ended with an error. fields: as in `of_omni`."""
    match error:
        case ApiError():
            return error
        case OmniError():
            return of_omni(error, fields)
        case RequestValidationError():
            return of_validation(error)
        case HTTPException():
            return _of_fastapi(error, request.method, request.scope["path"])
    return BUG


def _of_fastapi(error: HTTPException, method: str, path: str) -> ApiError:
    """The error for a request that FastAPI itself refuses. method, path: of the request."""
    later = next((name for prefix, name in LATER.items() if path == prefix or path.startswith(f"{prefix}/")), None)
    if error.status_code == 404 and later is not None:
        return ApiError(404, f"{later} is not offered yet", code="not_offered")
    if error.status_code == 404 and (absence := ollama.absence_at(path)):
        return ApiError(404, absence, code="not_offered")
    if error.status_code == 404:
        address = _similar_path(path)
        advice, hint = (f"; did you mean {address}?", OF_CLIENTS) if address else ("", "GET /openapi.json has all addresses.")
        return ApiError(404, f"Unknown request URL: {method} {path[:256]}{advice}", code="unknown_url", hint=hint)
    if error.status_code == 405:
        return ApiError(405, f"{method} is not for {path[:256]}", code="method_not_supported", headers=error.headers)
    return ApiError(error.status_code, str(error.detail), code="invalid_body")


OF_CLIENTS = "Clients of OpenAI's interface need a base URL that ends with /v1: this gateway's address, then /v1."

MAX_PATH_PARTS = 4
"""The most parts of an address."""

LIKENESS = 0.8
"""How similar, of 1, a misspelt address must be to one that there is."""


def _similar_path(path: str) -> str:
    """The address that was probably meant: the longest end of the path that is an address, or is one below /v1; otherwise an address of
    almost the same spelling. Empty: there is none."""
    routes = [route for endpoints in ENDPOINTS for route in endpoints.router.routes if isinstance(route, Route)]
    parts = [part for part in path[:256].split("/") if part][-MAX_PATH_PARTS:]
    for begin in range(len(parts)):
        end = "/" + "/".join(parts[begin:])
        for address in (end, f"/v1{end}"):
            scope = {"type": "http", "method": "GET", "path": address}
            if address != path and (address in LATER or any(route.matches(scope)[0] is not Match.NONE for route in routes)):
                return address
    names = [route.path for route in routes if "{" not in route.path]
    return next(iter(get_close_matches("/" + "/".join(parts), names, 1, LIKENESS)), "")
