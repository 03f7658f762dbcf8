"""Calls as our servers serve them: every call is a stream, a write raises CallerGone when the caller is gone, and a call that has ended
keeps no memory.

gRPC waits for the request of a call with one request for as long as the caller likes, and the server learns of the call only then. A call
that is a stream begins at once, so the server can count it and limit the wait.

An error refers to the frames in which it was raised, a task to its error, and a frame to its tasks. These references can form a cycle,
which would keep the media of a request in memory until the collector runs. So limits of time and cancelled tasks have functions here that
keep nothing of a request."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, suppress
from inspect import isasyncgenfunction
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from omnistage.wire.errors import CallerGone, StageError, abort, bad_request

LOOKS = 8
"""How many times `within` checks, before its limit, whether this process was held up."""


class within:
    """`async with within(seconds, make_error)`: raises the error that `make_error` returns if the block takes longer. The error refers to
    no task, unlike the error of `asyncio.timeout`, so a task may end with it.

    The limit is for waiting for a peer. So time in which this process was stopped, or its loop held up, does not count, because this
    process would not have heard a peer that answered in time. counts_all: count that time too, for an agreed moment such as a deadline.
    """

    def __init__(self, seconds: float, make_error: Callable[[], StageError], *, counts_all: bool = False) -> None:
        self._limit: asyncio.Timeout | None = asyncio.timeout(seconds)
        self._make_error = make_error
        self._look_s = math.inf if counts_all else max(seconds, 0.0) / LOOKS  # Seconds between two looks; infinite: there are none.
        self._next_look: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        assert self._limit is not None
        await self._limit.__aenter__()
        self._plan_look()

    def _plan_look(self) -> None:
        if math.isfinite(self._look_s):
            self._next_look = asyncio.get_running_loop().call_later(self._look_s, self._look)

    def _look(self) -> None:
        """Extend the limit by the seconds that this look comes too late. A loop that was held up past this look and the end of the limit
        runs this look first, because it was due first."""
        if self._limit is None or self._next_look is None or (end_s := self._limit.when()) is None or self._limit.expired():
            return
        late_s = asyncio.get_running_loop().time() - self._next_look.when()
        self._limit.reschedule(end_s + max(late_s, 0.0))
        self._plan_look()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        limit, self._limit = self._limit, None
        assert limit is not None
        if self._next_look is not None:
            self._next_look.cancel()
        try:
            await limit.__aexit__(kind, error, trace)
            return
        except TimeoutError:
            pass
        finally:
            del limit, error, trace  # The error that is raised below refers to this frame, and so to its variables.
        raise self._make_error() from None


def look_at_error(task: asyncio.Task[Any]) -> None:
    """Retrieve the error of a task that has ended, because asyncio logs an error that nobody retrieves. The error itself does not
    matter."""
    if not task.cancelled():
        task.exception()


def let_go(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel tasks whose results nobody needs any more; their errors are ignored."""
    for task in tasks:
        if task is not None:
            task.cancel()
            task.add_done_callback(look_at_error)


async def cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait for their end. Their errors were handled already or do not matter any more."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        look_at_error(task)


def forget_traceback(error: BaseException) -> None:
    """Remove the frames from an error that ends a call, and from its chain of contexts."""
    cause: BaseException | None = error
    while cause is not None:
        cause.__traceback__ = None
        cause = cause.__context__


if TYPE_CHECKING:  # At run time gRPC's classes take no type arguments.
    Context = grpc.aio.ServicerContext[Any, Any]
    Handler = grpc.RpcMethodHandler[Any, Any]

HEADERS_LIMIT_S = 2.0
"""Longest wait, in seconds, for a call's first write after that was cancelled. After this time the call ends as if its caller were gone."""

Serve = Callable[[Any, "Context"], Awaitable[None]]
"""A function that serves a call as a stream."""


async def write(context: Context, message: Any) -> None:
    """Write to the caller. Raises CallerGone."""
    with suppress(grpc.aio.InternalError):
        await context.write(message)
        return
    raise CallerGone


def as_stream(handler: Handler, hold: Callable[[Context], AbstractContextManager[None]], request_limit_s: float) -> Handler:
    """The same handler as one for a stream of requests, whatever kind of call it serves. hold: makes a context manager that is entered
    while a call is open; a StageError from it refuses the call. request_limit_s: time for the request to arrive, if the call has only
    one."""

    async def serve(requests: AsyncIterator[Any], context: Context) -> None:
        try:
            with hold(context):
                await _answer(handler, requests if handler.request_streaming else await _request(context, request_limit_s), context)
        except StageError as error:
            await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(leave_nothing(serve), handler.request_deserializer, handler.response_serializer)


def leave_nothing(serve: Serve) -> Serve:
    """Wrap `serve` so that the error which ends a call does not refer to the frames that served the call, because gRPC keeps or logs some
    errors."""

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
        except (CallerGone, grpc.aio.InternalError) as gone:  # InternalError comes from handlers of libraries, which write by themselves.
            forget_traceback(gone)
        except grpc.aio.AbortError as aborted:
            aborted.__context__ = None
            raise aborted.with_traceback(None) from None
        except asyncio.CancelledError as cancelled:
            forget_traceback(cancelled)
            raise
        raise asyncio.CancelledError  # In this way gRPC itself ends a call whose caller is gone.

    return serve_and_forget


class _Served:
    """A gRPC call whose headers are sent only once.

    gRPC sends the headers with the first write, and notes it when that write returns. If the first write is cancelled, gRPC sends the
    headers again with the status, fails, and the caller never sees an end. So the first write is never cancelled: the code that began it
    may stop waiting, and every later write waits until it has ended. That wait is short, because gRPC accepts megabytes of a call even if
    the client does not read.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._has_begun = False
        self._first: asyncio.Task[None] | None = None  # Kept only while it runs, because later its error would make a cycle.

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: Any) -> None:
        """Write a message to the caller, once the first write has ended. If this is the first write and the calling task is cancelled, the
        write goes on."""
        await self.headers_sent()
        if self._has_begun:
            await self._context.write(message)
            return
        self._has_begun = True
        self._first = asyncio.ensure_future(self._context.write(message))
        self._first.add_done_callback(self._first_is_over)
        await asyncio.shield(self._first)

    def _first_is_over(self, first: asyncio.Task[None]) -> None:
        """Note whether the first write has sent the headers."""
        look_at_error(first)
        self._first = None
        # A write that failed has sent nothing, for example a message that cannot be serialized.
        self._has_begun = not first.cancelled() and first.exception() is None

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> NoReturn:
        await self.headers_sent()
        await self._context.abort(code, details, trailing_metadata)

    async def headers_sent(self) -> None:
        """Wait until the first write has ended, well or not, or takes longer than HEADERS_LIMIT_S. Returns at once if there was none."""
        if self._first is not None:
            await asyncio.wait({self._first}, timeout=HEADERS_LIMIT_S)


async def _request(context: Context, limit_s: float) -> Any:
    """Read the one request of a call. Raises BAD_REQUEST if none comes in time."""
    try:
        async with within(limit_s, lambda: bad_request("request", f"it did not come within {limit_s:g} s")):
            request = await context.read()
    except DecodeError:
        raise bad_request("request", "these bytes are no such message") from None
    if request is grpc.aio.EOF:
        raise bad_request("request", "the call has none")
    return request


async def _answer(handler: Handler, request: Any, context: Context) -> None:
    """Call the method of a handler, and write what it returns or yields. request: the request, or an iterator over the requests."""
    # grpcio's stubs have the types of servers with threads.
    behavior: Any = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    if isasyncgenfunction(behavior):
        async for response in behavior(request, context):
            await write(context, response)
    elif handler.response_streaming:
        await behavior(request, context)
    else:
        await write(context, await behavior(request, context))


Message = TypeVar("Message")


class StreamWriter(Generic[Message]):
    """Lets many tasks write to one stream, in the order of their calls.

    It has a lock instead of a queue with a task, so a message without competitors is written without a switch of tasks, and a task that
    writes waits as long as the stream's own flow control demands. A stage writes to its caller by a queue, see `stage/caller.py`.
    """

    def __init__(self, write: Callable[[Message], Awaitable[None]]) -> None:
        self._write = write
        self._lock = asyncio.Lock()

    async def write(self, message: Message) -> None:
        async with self._lock:
            await self._write(message)

    async def half_close(self, finish: Callable[[], Awaitable[None]]) -> None:
        """Call `finish`, which half-closes the stream, after all earlier writes."""
        async with self._lock:
            await finish()
