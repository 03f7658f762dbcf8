"""Sends an answer piece by piece, and makes several answers to one request at the same time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from omnistage.client.answer import Answer, collect
from omnistage.client.errors import OmniError
from omnistage.client.events import Event
from omnistage.gateway.accounts import Events, HttpAccount
from omnistage.gateway.failure import ApiError, of_omni
from omnistage.host.background import end_tasks

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


def as_error(failure: ApiError) -> bytes:
    """The server-sent event that carries an error."""
    return as_event(failure.body)


ErrorPiece = Callable[[ApiError], bytes]
"""Makes the last piece of a stream, which reports an error to the client."""


class BrokenOff(Exception):
    """Raised if an answer fails after a part of it was sent and its form cannot carry an error; then the connection is broken off, so that
    no client mistakes the part that it has for a whole answer."""


async def stream_response(
    account: HttpAccount, pieces: Pieces, *, media_type: str = EVENTS, error_piece: ErrorPiece | None = as_error
) -> StreamedResponse:
    """A response that sends pieces as they come. An error before the first piece is raised here, so that the answer can have the error's
    status; a later error is reported in a last piece. error_piece: makes that last piece; None: the form of the answer cannot carry an
    error, so the connection is broken off."""
    first = await anext(pieces, b"")  # An empty piece sends nothing.
    return StreamedResponse(_with_errors(first, pieces, account, error_piece), pieces, media_type)


async def _with_errors(first: bytes, pieces: Pieces, account: HttpAccount, error_piece: ErrorPiece | None) -> Pieces:
    """Yields `first`, then the other pieces. If an error ends them, notes it in the account, and yields the piece that `error_piece` makes
    of it."""
    try:
        yield first
        async for piece in pieces:
            yield piece
    except (OmniError, ApiError) as error:
        failure = of_omni(error, account.fields) if isinstance(error, OmniError) else error
        account.note_failure(failure)
        if error_piece is None:
            raise BrokenOff from error
        yield error_piece(failure)


class StreamedResponse(StreamingResponse):
    """Sends `content`. At the end, which may be an error or the leaving of the client, `pieces` is closed, from which the content comes."""

    def __init__(self, content: Pieces, pieces: Pieces, media_type: str) -> None:
        super().__init__(content, headers=STREAM_HEADERS, media_type=media_type)
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._pieces):
            await self.stream_response(send)


Numbered = AsyncGenerator[tuple[int, Event], None]

MAX_UNSENT_EVENTS = 16
"""The most events that wait to be sent to the client; when so many wait, the answers pause."""


async def run_all(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all works, which run at the same time, in order. If one fails, the others are cancelled and its error is raised."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await end_tasks(tasks)


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
        await end_tasks(tasks)


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
