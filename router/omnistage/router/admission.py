"""The door of the router: it gives a request a place, lets it wait for a place for a moment, or refuses it. places.py holds the policy;
this file has the clock and the events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from omnistage.host.places import Client, Places, Refused, Ticket
from omnistage.wire.errors import StageError

WAIT_S = 3.0
"""Longest wait for a place, in seconds."""

STALLED_S = 2.0
"""A client that has left its answer unread for this long loses its place when somebody else waits for it. While nobody waits, the client
may stall for `--stall-limit`."""


class Place:
    """The place of one answer, or the wait of one answer for a place.

    given: an event that is set when the ticket has a place, or waits no more. taken_back: a future that is done when another client needs
    the place; then the answer must end. writing_since: moment since which the client reads nothing, in time.monotonic() seconds; None: it
    reads. queued_s: seconds that the answer waited for the place."""

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.given = asyncio.Event()
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
        return self._places.taken

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
            if not place.ticket.given:
                place.given.set()

    @asynccontextmanager
    async def place(self, client: Client) -> AsyncIterator[Place]:
        """A context manager that holds a place for an answer to this client. If the client may wait, it waits at most WAIT_S for a place.
        Raises OVERLOADED with a delay, or DRAINING."""
        if self._draining.is_set():
            raise _draining()
        self._places.limit = self._limit()
        self._tell(self._places.fill())
        try:
            ticket = self._places.ask(client)
        except Refused as refusal:
            raise overload_error(str(refusal)) from None
        place = self._open[ticket] = Place(ticket)
        try:
            if not ticket.given:
                await self._wait(place)
            self._idle.clear()
            yield place
        finally:
            del self._open[ticket]
            place.taken_back.cancel()
            self._tell(self._places.leave(ticket))
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
        while not place.ticket.given:
            left_s = begin_s + WAIT_S - time.monotonic()
            if left_s <= 0:
                raise overload_error(f"all {self._places.limit} places are taken, and none became free within {WAIT_S:g} s")
            try:
                async with asyncio.timeout(min(left_s, self._take_back())):
                    await place.given.wait()
            except TimeoutError:
                continue
            if self._draining.is_set() and not place.ticket.given:
                raise _draining()
        place.queued_s = time.monotonic() - begin_s

    def _take_back(self) -> float:
        """Take back places from the clients that have stalled longest: as many as requests wait, less the places whose answers are ending
        already. Returns the seconds until the caller should look once more."""
        now_s = time.monotonic()
        stalling = [place for place in self._open.values() if place.writing_since is not None and not place.taken_back.done()]
        leaving = sum(place.taken_back.done() for place in self._open.values())
        for place in sorted(stalling, key=lambda place: place.writing_since or now_s)[: max(self.waiting - leaving, 0)]:
            stalled_s = now_s - (place.writing_since or now_s)
            if stalled_s < STALLED_S:
                return STALLED_S - stalled_s
            place.taken_back.set_result(None)
        return STALLED_S

    def _tell(self, tickets: list[Ticket]) -> None:
        """Wake the requests whose tickets have got a place."""
        for ticket in tickets:
            self._open[ticket].given.set()


def overload_error(reason: str) -> StageError:
    """The error of a request for which there is no room now."""
    return StageError("OVERLOADED", f"{reason}; try again")


def _draining() -> StageError:
    return StageError("DRAINING", "this router is shutting down; ask another")
