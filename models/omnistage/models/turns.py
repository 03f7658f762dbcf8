"""The order in which clients are served, and the share of a host in what all have together. Hosts are served in turn, the clients of a host
in turn, and each client's own requests as they came.

A client is named HOST/CLIENT, as the router names it, or by any other text, which then is its host too."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

HOST_SHARE = 0.75
"""The largest part of the bytes that others leave, for one host. A host that holds none gets what is free."""

Line = deque[asyncio.Future[None]]
"""The waiting requests of one client."""


class WaitingPlaces:
    """Up to `places` requests run at once, and max_waiting more may wait. If there are several places, a client holds at most all but one,
    so that no client keeps others waiting. When too many wait, the last of the longest line gives way to a host with a shorter line, or to
    a client of the same host with one. make_error: makes the error for a refused request from the number of waiting requests."""

    def __init__(self, places: int, max_waiting: int, make_error: Callable[[int], Exception]) -> None:
        self._make_error = make_error
        self._free = places
        self._max_each = max(places - 1, 1)
        self._max_waiting = max_waiting
        self._place_counts = Counter[str]()  # How many places each client holds.
        self._lines: dict[str, dict[str, Line]] = {}  # By host and client; of both, the one served longest ago is first.

    @property
    def waiting(self) -> int:
        return sum(map(_length, self._lines.values()))

    @asynccontextmanager
    async def hold(self, client: str) -> AsyncIterator[None]:
        """Wait for a place, and hold it in this context. Raises the error of `make_error`."""
        await self.enter(client)
        try:
            yield
        finally:
            self.leave(client)

    async def enter(self, client: str) -> None:
        """Wait for a place, which must be given back by `leave`. Raises the error of `make_error`."""
        if self._may_enter(client):
            self._take(client)
            return
        if self.waiting >= self._max_waiting:
            self._make_room(client)
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        host = host_of(client)
        self._lines.setdefault(host, {}).setdefault(client, deque()).append(place)
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled() and not place.exception():
                self.leave(client)  # a place was given to this request just before the cancellation
            elif place in self._lines.get(host, {}).get(client, ()):
                self._drop(client, place)
            raise

    def leave(self, client: str) -> None:
        """Give back a place of a client. It goes to a client that may have it, of the host that was served longest ago."""
        host = host_of(client)
        self._free += 1
        self._place_counts[client] -= 1
        if not self._place_counts[client]:
            del self._place_counts[client]
        if host in self._lines:
            lines = self._lines[host] = self._lines.pop(host)  # after all others, which were served longer ago
            if client in lines:
                lines[client] = lines.pop(client)
        while True:
            able_clients = (name for lines in self._lines.values() for name in lines if self._may_enter(name))
            next_client = next(able_clients, None)
            if next_client is None:
                return
            lines = self._lines.pop(host_of(next_client))
            line = lines.pop(next_client)
            place = line.popleft()
            if line:
                lines[next_client] = line
            if lines:
                self._lines[host_of(next_client)] = lines
            if not place.done():
                self._take(next_client)
                place.set_result(None)

    def _may_enter(self, client: str) -> bool:
        return self._free > 0 and self._place_counts[client] < self._max_each

    def _take(self, client: str) -> None:
        self._free -= 1
        self._place_counts[client] += 1

    def _make_room(self, client: str) -> None:
        """Make room for one more request of a client. Raises the error of a full queue if no host has a longer line than its host would
        have, and no client of its host a longer line than this one would have."""
        error, own_lines = self._make_error(self.waiting), self._lines.get(host_of(client), {})
        host_lines = max(self._lines.values(), key=_length, default=own_lines)
        if _length(host_lines) <= _length(own_lines) + 1:
            host_lines = own_lines
        longest = max(reversed(host_lines), key=lambda name: len(host_lines[name]), default=client)  # The last of equals.
        if host_lines is own_lines and len(own_lines.get(longest, ())) <= len(own_lines.get(client, ())) + 1:
            raise error
        place = host_lines[longest][-1]
        self._drop(longest, place)
        if not place.done():
            place.set_exception(error)

    def _drop(self, client: str, place: asyncio.Future[None]) -> None:
        """Remove a waiting request from its client's line."""
        host = host_of(client)
        self._lines[host][client].remove(place)
        if not self._lines[host][client]:
            del self._lines[host][client]
        if not self._lines[host]:
            del self._lines[host]


def host_of(client: str) -> str:
    """The host of a client."""
    return client.partition("/")[0]


def has_room(size_bytes: int, held_bytes: int, of_host_bytes: int, limit_bytes: int) -> bool:
    """Whether a host may hold so many more bytes. held_bytes: of all hosts. of_host_bytes: of this one. limit_bytes: of all together."""
    free_bytes = limit_bytes - held_bytes
    if not of_host_bytes:
        return size_bytes <= free_bytes
    return size_bytes <= free_bytes and of_host_bytes + size_bytes <= HOST_SHARE * (free_bytes + of_host_bytes)


def _length(lines: dict[str, Line]) -> int:
    """The number of waiting requests of a host."""
    return sum(map(len, lines.values()))
