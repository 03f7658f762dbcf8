"""The door of the router. `Admission` gives a request a place, lets it wait for a place for a moment, or refuses it: `host/places.py` holds
the policy, this file has the clock and the events. `Gate` limits the open calls of each client; gRPC itself limits only the calls of all
clients together, and calls that stay open, such as a watch of the health or a call whose request never comes, would soon take all of them.
`Turns` lets large requests be decoded one at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import grpc
import grpc.aio
from grpc_health.v1.health import SERVICE_NAME as HEALTH

from omnistage.host.places import Client, Places, Refused, Ticket
from omnistage.router.callers import Callers
from omnistage.wire.calls import as_stream, within
from omnistage.wire.errors import StageError
from omnistage.wire.limits import MAX_CALLS

WAIT_S = 3.0
"""Longest wait for a place, in seconds."""

STALLED_S = 2.0
"""A client that has left its answer unread for this long loses its place when somebody else waits for it. While nobody waits, the client
may stall for `--stall-limit`."""


class Place:
    """The place of one answer, or the wait of one answer for a place.

    decided: an event that is set when the ticket has a place, or waits no more. taken_back: a future that is done when another client needs
    the place; then the answer must end. writing_since: moment since which the client reads nothing, in time.monotonic() seconds; None: it
    reads. queued_s: seconds that the answer waited for the place."""

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.decided = asyncio.Event()
        self.taken_back: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.writing_since: float | None = None
        self.queued_s = 0.0


class Admission:
    """Gives places to clients."""

    def __init__(self, limit: Callable[[], int], share: float) -> None:
        """limit: returns the number of places, which may change. share: greatest part of the places that one client may hold, 0 to 1."""
        self._limit = limit
        self._places = Places(limit(), share)
        self._open: dict[Ticket, Place] = {}
        self._draining = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def running(self) -> int:
        return self._places.taken_places

    @property
    def waiting(self) -> int:
        return self._places.waiting

    @property
    def limit(self) -> int:
        return self._limit()

    def drain(self) -> None:
        """From now on refuse all new requests, and those that wait for a place."""
        self._draining.set()
        for place in self._open.values():
            if not place.ticket.has_place:
                place.decided.set()

    @asynccontextmanager
    async def place(self, client: Client) -> AsyncIterator[Place]:
        """A context manager that holds a place for an answer to this client. If the client may wait, it waits at most WAIT_S for a place.
        Raises OVERLOADED with a delay, or DRAINING."""
        if self._draining.is_set():
            raise _draining()
        self._places.limit = self._limit()
        self._wake(self._places.fill())  # A higher limit makes room for requests that wait.
        try:
            ticket = self._places.ask(client)
        except Refused as refusal:
            raise overload_error(str(refusal)) from None
        place = self._open[ticket] = Place(ticket)
        try:
            if not ticket.has_place:
                await self._wait(place)
            self._idle.clear()
            yield place
        finally:
            del self._open[ticket]
            place.taken_back.cancel()
            self._wake(self._places.leave(ticket))
            if not self.running:
                self._idle.set()

    async def drains(self) -> None:
        """Wait until this router drains, then raise DRAINING."""
        await self._draining.wait()
        raise _draining()

    async def idle(self) -> None:
        """Return when no answer runs."""
        await self._idle.wait()

    async def _wait(self, place: Place) -> None:
        """Wait until the ticket has a place; meanwhile, take places from clients that stall. Raises OVERLOADED after WAIT_S, or
        DRAINING."""
        begin_s = time.monotonic()
        while not place.ticket.has_place:
            remaining_s = begin_s + WAIT_S - time.monotonic()
            if remaining_s <= 0:
                raise overload_error(f"all {self._places.limit} places are taken, and none became free within {WAIT_S:g} s")
            try:
                async with asyncio.timeout(min(remaining_s, self._take_back())):
                    await place.decided.wait()
            except TimeoutError:
                continue
            if self._draining.is_set() and not place.ticket.has_place:
                raise _draining()
        place.queued_s = time.monotonic() - begin_s

    def _take_back(self) -> float:
        """Take back places from the clients that have stalled longest, one for each request that waits. A place whose answer is ending
        already serves one of these requests. Returns the seconds until the caller should look once more."""
        now_s = time.monotonic()
        stalling = [place for place in self._open.values() if place.writing_since is not None and not place.taken_back.done()]
        ending_count = sum(place.taken_back.done() for place in self._open.values())
        # `or now_s` is for the type checker: no place in `stalling` has None.
        for place in sorted(stalling, key=lambda place: place.writing_since or now_s)[: max(self.waiting - ending_count, 0)]:
            stalled_s = now_s - (place.writing_since or now_s)
            if stalled_s < STALLED_S:
                return STALLED_S - stalled_s
            place.taken_back.set_result(None)
        return STALLED_S

    def _wake(self, tickets: list[Ticket]) -> None:
        """Wake the requests whose tickets have got a place."""
        for ticket in tickets:
            self._open[ticket].decided.set()


def overload_error(reason: str) -> StageError:
    """The error of a request for which there is no room now."""
    return StageError("OVERLOADED", f"{reason}; try again")


def _draining() -> StageError:
    return StageError("DRAINING", "this router is shutting down; ask another")


MAX_OPEN = MAX_CALLS * 3 // 4
"""Largest number of open calls of all clients together. It is below gRPC's own limit, so that the gate can refuse further calls with a
reason."""

MAX_HEALTH = MAX_CALLS // 16
"""Largest number of open calls of the health service's Check, and of its Watch."""

REQUEST_LIMIT_S = 60.0
"""Time for a request to arrive: 64 MiB at 9 Mbit/s."""

if TYPE_CHECKING:  # At run time gRPC's classes take no type arguments.
    Context = grpc.aio.ServicerContext[Any, Any]
    Handler = grpc.RpcMethodHandler[Any, Any]


class Gate(grpc.aio.ServerInterceptor):
    """An interceptor that takes a place for every call before its service runs, and refuses a call that gets none with OVERLOADED."""

    def __init__(self, callers: Callers | None = None, request_limit_s: float = REQUEST_LIMIT_S) -> None:
        self._callers = callers or Callers()
        self._request_limit_s = request_limit_s
        self._open = Places(MAX_OPEN)
        self._health = {f"/{HEALTH}/{method}": Places(MAX_HEALTH) for method in ("Check", "Watch")}

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]], details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(details)
        return handler and self._gated(handler, self._health.get(details.method, self._open))

    def _gated(self, handler: Handler, places: Places) -> Handler:
        """Wrap a handler so that it holds one of `places` for the caller while a call runs, and ends a call whose request does not come in
        time."""

        @contextmanager
        def place(context: Context) -> Iterator[None]:
            try:
                ticket = places.take(self._callers.client_of(context))
            except Refused as refused:
                raise overload_error(f"too many calls are open: {refused}") from None
            try:
                yield
            finally:
                places.leave(ticket)

        return as_stream(handler, place, self._request_limit_s)


MAX_LARGE = 64
"""Largest number of large requests of all clients together that are being decoded or wait for a turn."""

TURN_LIMIT_S = 30.0
"""Longest wait for a turn, in seconds."""


class Turns:
    """Gives a turn, the right to decode, to one request at a time. Hosts take turns, and so do the clients of a host. limit_s: longest wait
    for a turn, in seconds."""

    def __init__(self, limit_s: float = TURN_LIMIT_S) -> None:
        self._limit_s = limit_s
        self._places = Places(MAX_LARGE)
        self._turn = asyncio.Lock()  # Held by the request whose turn it is. All locks are fair.
        self._locks: WeakValueDictionary[Client | str, asyncio.Lock] = WeakValueDictionary()
        """The locks of clients, and of hosts by name: no client and no host has two requests among those that wait for `_turn`."""

    @asynccontextmanager
    async def turn(self, client: Client) -> AsyncIterator[None]:
        """A context manager: wait for a turn, and hold it. Raises OVERLOADED with a delay."""
        try:
            ticket = self._places.take(client)
        except Refused:
            raise overload_error("too many large requests wait to be read") from None
        try:
            async with AsyncExitStack() as stack:
                async with within(
                    self._limit_s, lambda: overload_error(f"this large request could not be read within {self._limit_s:g} s")
                ):
                    for lock in (self._locks.setdefault(client, asyncio.Lock()), self._locks.setdefault(client.host, asyncio.Lock())):
                        await stack.enter_async_context(lock)
                    await stack.enter_async_context(self._turn)
                yield
        finally:
            self._places.leave(ticket)
