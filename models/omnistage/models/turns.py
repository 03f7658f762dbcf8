"""The order in which clients are served: in turn, each client's own requests in the order in which they came."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager


class WaitingPlaces:
    """Up to `places` requests run at once, and max_waiting more may wait. If there are several places, a client holds at most all but one,
    so that no client keeps others waiting. When too many wait, the last of the longest line gives way to a client with a shorter line.
    full: makes the error for a refused request from the number of waiting requests."""

    def __init__(self, places: int, max_waiting: int, full: Callable[[int], Exception]) -> None:
        self._full = full
        self._free = places
        self._max_each = max(places - 1, 1)
        self._max_waiting = max_waiting
        self._held = Counter[Hashable]()  # How many places each client holds.
        self._lines: dict[Hashable, deque[asyncio.Future[None]]] = {}  # Waiting requests; the client served longest ago is first.

    @property
    def waiting(self) -> int:
        return sum(map(len, self._lines.values()))

    @asynccontextmanager
    async def taken(self, client: Hashable) -> AsyncIterator[None]:
        """Wait for a place, and hold it in this context. Raises the error of `full`."""
        await self.enter(client)
        try:
            yield
        finally:
            self.leave(client)

    async def enter(self, client: Hashable) -> None:
        """Wait for a place, which must be given back by `leave`. Raises the error of `full`."""
        if self._may_enter(client):
            self._take(client)
            return
        if self.waiting >= self._max_waiting:
            self._make_room(client)
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(client, deque()).append(place)
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled() and not place.exception():
                self.leave(client)  # a place was given to this request just before the cancellation
            elif client in self._lines and place in self._lines[client]:
                self._drop(client, place)
            raise

    def leave(self, client: Hashable) -> None:
        """Give back a place of a client. It goes to the client that was served longest ago, among clients that may have it."""
        self._free += 1
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]
        if client in self._lines:
            self._lines[client] = self._lines.pop(client)  # after all others, which were served longer ago
        while (following := next(filter(self._may_enter, self._lines), None)) is not None:
            line = self._lines.pop(following)
            place = line.popleft()
            if line:
                self._lines[following] = line
            if not place.done():
                self._take(following)
                place.set_result(None)

    def _may_enter(self, client: Hashable) -> bool:
        return self._free > 0 and self._held[client] < self._max_each

    def _take(self, client: Hashable) -> None:
        self._free -= 1
        self._held[client] += 1

    def _make_room(self, client: Hashable) -> None:
        """Make room for one more request of a client. Raises `full` if no client has a longer line than this one would have."""
        full = self._full(self.waiting)
        longest = max(self._lines, key=lambda one: len(self._lines[one]), default=client)
        if len(self._lines.get(longest, ())) <= len(self._lines.get(client, ())) + 1:
            raise full
        place = self._lines[longest][-1]
        self._drop(longest, place)
        if not place.done():
            place.set_exception(full)

    def _drop(self, client: Hashable, place: asyncio.Future[None]) -> None:
        """Remove a waiting request from its client's line."""
        self._lines[client].remove(place)
        if not self._lines[client]:
            del self._lines[client]
