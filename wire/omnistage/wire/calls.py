"""Calls as this project serves them: as streams, with writes that tell when the caller is gone, and an end that is heard and keeps nothing.

gRPC waits for the one request of a call for as long as the caller likes before its server hears of the call. A stream it begins at once, so
that the server can count the call, and put an end to the wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, suppress
from inspect import isasyncgenfunction
from typing import TYPE_CHECKING, Any, NoReturn, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from omnistage.wire.errors import CallerGone, StageError, abort, bad_request
from omnistage.wire.tasks import forget_traceback, look_at_error, within

if TYPE_CHECKING:  # At run time gRPC's classes take no type arguments.
    Context = grpc.aio.ServicerContext[Any, Any]
    Handler = grpc.RpcMethodHandler[Any, Any]

HEADERS_LIMIT_S = 2.0
"""Longest wait for a first write that was given up. After it the call ends as one whose caller is gone."""

Serve = Callable[[Any, "Context"], Awaitable[None]]
"""What serves a call as a stream."""


async def write(context: Context, message: Any) -> None:
    """Write to the caller. Raises CallerGone."""
    with suppress(grpc.aio.InternalError):
        await context.write(message)
        return
    raise CallerGone


def as_stream(handler: Handler, hold: Callable[[Context], AbstractContextManager[None]], request_limit_s: float) -> Handler:
    """The same call as a stream. hold: what is held while the call is open; a StageError of it refuses the call. request_limit_s: time for
    the request to arrive, where the call has only one."""

    async def serve(requests: AsyncIterator[Any], context: Context) -> None:
        try:
            with hold(context):
                await _answer(handler, requests if handler.request_streaming else await _request(context, request_limit_s), context)
        except StageError as error:
            await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(leaving_nothing(serve), handler.request_deserializer, handler.response_serializer)


def leaving_nothing(serve: Serve) -> Serve:
    """The same, where nothing leads from the error that ends a call to what served it: gRPC keeps some with the call, and logs some."""

    async def serve_and_forget(requests: Any, context: Context) -> None:
        served = _Served(context)
        try:
            try:
                await serve(requests, cast("Context", served))
            except Exception:
                await served.headers_sent()
                raise
            await served.headers_sent()
            return
        except (CallerGone, grpc.aio.InternalError) as gone:  # An InternalError: of a handler of a library, which writes by itself.
            forget_traceback(gone)
        except grpc.aio.AbortError as aborted:
            aborted.__context__ = None
            raise aborted.with_traceback(None) from None
        except asyncio.CancelledError as cancelled:
            forget_traceback(cancelled)
            raise
        raise asyncio.CancelledError  # As gRPC itself ends such a call.

    return serve_and_forget


class _Served:
    """A call as gRPC has it, whose headers go out once.

    gRPC sends them with the first write, and notes it when that write returns. After one that was cancelled it would send them with the
    status again, fail at that, and leave the caller without an end. So the first write is never cancelled, only left alone by who waits
    for it, and what follows waits for it: not long, as gRPC takes megabytes of a call whatever its caller reads.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._has_begun = False
        self._first: asyncio.Task[None] | None = None  # While it is under way: its error would lead to this, as this to it.

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: Any) -> None:
        await self.headers_sent()
        if self._has_begun:
            await self._context.write(message)
            return
        self._has_begun = True
        self._first = asyncio.ensure_future(self._context.write(message))
        self._first.add_done_callback(self._first_is_over)
        await asyncio.shield(self._first)

    def _first_is_over(self, first: asyncio.Task[None]) -> None:
        look_at_error(first)
        self._first = None
        # One that failed has sent nothing, as a message that cannot be serialized.
        self._has_begun = not first.cancelled() and first.exception() is None

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> NoReturn:
        await self.headers_sent()
        await self._context.abort(code, details, trailing_metadata)

    async def headers_sent(self) -> None:
        """The first write is over, well or not, or takes too long to wait for; at once where there was none."""
        if self._first is not None:
            await asyncio.wait({self._first}, timeout=HEADERS_LIMIT_S)


async def _request(context: Context, limit_s: float) -> Any:
    """The one request of a call. Raises BAD_REQUEST where none comes in time."""
    try:
        async with within(limit_s, lambda: bad_request("request", f"it did not come within {limit_s:g} s")):
            request = await context.read()
    except DecodeError:
        raise bad_request("request", "these bytes are no such message") from None
    if request is grpc.aio.EOF:
        raise bad_request("request", "the call has none")
    return request


async def _answer(handler: Handler, asked: Any, context: Context) -> None:
    # The types of grpcio's stubs are those of servers with threads.
    behavior: Any = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    if isasyncgenfunction(behavior):
        async for response in behavior(asked, context):
            await write(context, response)
    elif handler.response_streaming:
        await behavior(asked, context)
    else:
        await write(context, await behavior(asked, context))
