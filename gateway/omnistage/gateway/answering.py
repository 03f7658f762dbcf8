"""Sends an answer whole or piece by piece, and ends it when its client has left; makes several answers to one request at the same time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from omnistage.client.answer import Answer, collect
from omnistage.client.errors import OmniError
from omnistage.client.events import Event
from omnistage.gateway.accounts import HttpAccount
from omnistage.gateway.failure import ApiError, in_words_of, of_omni

T = TypeVar("T")

Pieces = AsyncGenerator[bytes, None]

STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Headers that forbid proxies on the way to hold pieces back."""

EVENTS = "text/event-stream"

DONE = b"data: [DONE]\n\n"

LINE_ENDS = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"})
"""JSON's escapes for characters at which some clients end a line, though a server-sent event does not."""


def as_event(data: Mapping[str, Any], name: str = "") -> bytes:
    """The bytes of one server-sent event. name: the kind of the event; empty: events of this interface have no kind."""
    line = json.dumps(data, ensure_ascii=False, separators=(",", ":")).translate(LINE_ENDS).encode()
    return (b"event: " + name.encode() + b"\n" if name else b"") + b"data: " + line + b"\n\n"


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. If the client leaves, cancel `work` and raise ClientDisconnect."""
    working, leaving = asyncio.ensure_future(work), asyncio.create_task(_wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        await _end(working, leaving)


async def begin_pieces(pieces: Pieces) -> Pieces:
    """Wait for the first piece, and return all pieces. An error before the first piece is raised here, so that the answer can have the
    error's status."""
    try:
        first = await anext(pieces)
    except StopAsyncIteration:
        first = b""  # There are no pieces; `_from` yields no empty one.
    except BaseException:
        await pieces.aclose()
        raise
    return _from(first, pieces)


async def _from(first: bytes, pieces: Pieces) -> Pieces:
    """Yields `first`, then the other pieces."""
    try:
        if first:
            yield first
        async for piece in pieces:
            yield piece
    finally:
        await pieces.aclose()


def as_error(failure: ApiError) -> bytes:
    """The server-sent event that carries an error."""
    return as_event(failure.body)


ErrorPiece = Callable[[ApiError], bytes]
"""Makes the last piece of a stream, which reports an error to the client."""


async def stream_response(
    request: Request, pieces: Pieces, fields: Mapping[str, str], *, media_type: str = EVENTS, error_piece: ErrorPiece | None = as_error
) -> Response:
    """A response that sends pieces as they come. An error before the first piece is raised; a later error is reported in a last piece.
    fields: as in `of_omni`. error_piece: makes that last piece; None: the form of the answer cannot carry an error, so the connection is
    broken off."""
    account: HttpAccount = request.state.account
    with in_words_of(fields):
        begun_pieces = await unless_gone(request, begin_pieces(pieces))
    return StreamedResponse(_with_errors(begun_pieces, account, fields, error_piece), media_type)


async def _with_errors(pieces: Pieces, account: HttpAccount, fields: Mapping[str, str], error_piece: ErrorPiece | None) -> Pieces:
    """Yields the pieces. If an error ends them, notes it in the account, and yields the piece that `error_piece` makes of it."""
    try:
        async for piece in pieces:
            yield piece
    except (OmniError, ApiError) as error:
        failure = of_omni(error, fields) if isinstance(error, OmniError) else error
        account.note_failure(failure)
        if error_piece is None:
            raise BrokenOff from error
        yield error_piece(failure)
    finally:
        await pieces.aclose()


class BrokenOff(Exception):
    """Raised if an answer fails after a part of it was sent and its form cannot carry an error; then the connection is broken off."""


class StreamedResponse(Response):
    """Sends pieces as they come. When the client leaves, or an error ends the pieces, they are closed. An error breaks the connection
    off, so that no client mistakes the part that it has for a whole answer."""

    def __init__(self, pieces: Pieces, media_type: str) -> None:
        self.pieces = pieces
        self.status_code = 200
        self.media_type = media_type
        self.body = b""
        self.background = None
        self.init_headers(STREAM_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending, leaving = asyncio.create_task(self._send(send)), asyncio.create_task(_wait_for_disconnect(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                raise ClientDisconnect
            sending.result()
        finally:
            await _end(sending, leaving)
            await self.pieces.aclose()

    async def _send(self, send: Send) -> None:
        """Send the head of the response, every piece, and the end."""
        # No Content-Length, because the length is not known yet.
        headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        async for piece in self.pieces:
            if piece:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait for their end."""
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError, Exception):
            await task


Events = AsyncGenerator[Event, None]
Numbered = AsyncGenerator[tuple[int, Event], None]

MAX_UNSENT_EVENTS = 16
"""The most events that wait to be sent to the client; when so many wait, the answers pause."""


async def collect_all(answers: Sequence[Events]) -> list[Answer]:
    """All answers, in order. If one fails, the others are cancelled and its error is raised."""
    tasks = [asyncio.create_task(collect_whole(events)) for events in answers]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _end_all(tasks)


async def merge_events(answers: Sequence[Events]) -> Numbered:
    """Yield (number of its answer, event) for the events of all answers, as they come. If one answer fails, the others are cancelled and
    its error is raised."""
    if len(answers) == 1:
        async with aclosing(answers[0]) as events:
            async for event in events:
                yield 0, event
        return
    queue: asyncio.Queue[tuple[int, Event | Exception | None]] = asyncio.Queue(MAX_UNSENT_EVENTS)
    tasks = [asyncio.create_task(_feed(number, events, queue)) for number, events in enumerate(answers)]
    try:
        running = len(tasks)
        while running:
            number, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield number, item
    finally:
        await _end_all(tasks)


async def collect_whole(events: Events) -> Answer:
    """One answer. Its events are closed at the end, also after an error."""
    async with aclosing(events):
        return await collect(events)


async def _feed(number: int, events: Events, queue: asyncio.Queue[tuple[int, Event | Exception | None]]) -> None:
    """Put all events into the queue as (number, event), and at the end None, or the error that ended them, in place of an event."""
    try:
        async with aclosing(events):
            async for event in events:
                await queue.put((number, event))
    except Exception as error:  # The reader of the queue raises the error.
        await queue.put((number, error))
    else:
        await queue.put((number, None))


async def _end_all(tasks: Sequence[asyncio.Task[object]]) -> None:
    """Cancel tasks and wait for their end, unless the caller is cancelled meanwhile."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
