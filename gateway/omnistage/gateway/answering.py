"""How an answer goes out: whole, or piece by piece; and how it ends when its client has left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from omnistage.client.errors import OmniError
from omnistage.gateway.account import Account
from omnistage.gateway.failure import ApiError, in_words_of, of_omni

T = TypeVar("T")

Pieces = AsyncGenerator[bytes, None]

STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Nobody on the way keeps pieces back."""

EVENTS = "text/event-stream"

DONE = b"data: [DONE]\n\n"

LINE_ENDS = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"})
"""Where some clients end a line, though an event does not; JSON may write them otherwise."""


def as_event(data: Mapping[str, Any], name: str = "") -> bytes:
    """One server-sent event. name: of its kind, where the interface has one."""
    line = json.dumps(data, ensure_ascii=False, separators=(",", ":")).translate(LINE_ENDS).encode()
    return (b"event: " + name.encode() + b"\n" if name else b"") + b"data: " + line + b"\n\n"


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns. When the client leaves it is cancelled, and ClientDisconnect raised."""
    working, leaving = asyncio.ensure_future(work), asyncio.create_task(_left(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        await _end(working, leaving)


async def begun(pieces: Pieces) -> Pieces:
    """The same pieces, when the first one is there: what is refused before it, is an error and no stream."""
    try:
        first = await anext(pieces)
    except StopAsyncIteration:
        first = b""
    except BaseException:
        await pieces.aclose()
        raise
    return _from(first, pieces)


async def _from(first: bytes, pieces: Pieces) -> Pieces:
    try:
        if first:
            yield first
        async for piece in pieces:
            yield piece
    finally:
        await pieces.aclose()


def as_error(failure: ApiError) -> bytes:
    """The server-sent event of one."""
    return as_event(failure.body)


Telling = Callable[[ApiError], bytes]
"""How a stream says with its last piece what went wrong."""


async def streamed(
    request: Request, pieces: Pieces, fields: Mapping[str, str], *, media_type: str = EVENTS, telling: Telling | None = as_error
) -> Response:
    """Pieces as they come. What goes wrong before the first one is raised, and gets a status of its own; after it the last piece tells it.
    fields: as of `of_omni`. telling: None: the form of the answer has no words for it, and it is broken off."""
    account: Account = request.state.account
    with in_words_of(fields):
        first = await unless_gone(request, begun(pieces))
    return Streamed(_with_errors(first, account, fields, telling), media_type)


async def _with_errors(pieces: Pieces, account: Account, fields: Mapping[str, str], telling: Telling | None) -> Pieces:
    try:
        async for piece in pieces:
            yield piece
    except (OmniError, ApiError) as error:
        failure = of_omni(error, fields) if isinstance(error, OmniError) else error
        account.failed(failure)
        if telling is None:
            raise BrokenOff from error
        yield telling(failure)
    finally:
        await pieces.aclose()


class BrokenOff(Exception):
    """An answer failed when a part of it had gone out, and its form has no words for that: its connection is broken off."""


class Streamed(Response):
    """Pieces as they come. When the client leaves, or the pieces fail, they are closed; what fails breaks the connection off, so that
    nobody takes what came for the whole."""

    def __init__(self, pieces: Pieces, media_type: str) -> None:
        self.pieces = pieces
        self.status_code = 200
        self.media_type = media_type
        self.body = b""
        self.background = None
        self.init_headers(STREAM_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending, leaving = asyncio.create_task(self._send(send)), asyncio.create_task(_left(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                raise ClientDisconnect
            sending.result()
        finally:
            await _end(sending, leaving)
            await self.pieces.aclose()

    async def _send(self, send: Send) -> None:
        # A response of unknown length has no Content-Length.
        headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        async for piece in self.pieces:
            if piece:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError, Exception):
            await task
