"""Who is served next: clients in turn, each first come, first served."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from omnistage.models.media.errors import DecoderFull


class Turns:
    """So many places, and so many that may wait for one."""

    def __init__(self, places: int, max_waiting: int) -> None:
        self._free = places
        self._max_waiting = max_waiting
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @property
    def waiting(self) -> int:
        """Of all clients."""
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def taken(self, client: str) -> AsyncIterator[None]:
        """In a place, which is waited for. Raises DecoderFull."""
        await self.enter(client)
        try:
            yield
        finally:
            self.leave()

    async def enter(self, client: str) -> None:
        """Wait for a place; then `leave` it. Raises DecoderFull."""
        if self._free:
            self._free -= 1
            return
        if self.waiting >= self._max_waiting:
            raise DecoderFull(f"{self.waiting} media wait to be decoded: ask again later")
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(place)
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():
                self.leave()  # it was given in the same turn of the loop
            elif line := self._waiting.get(client):
                self._drop(client, line, place)
            raise

    def leave(self) -> None:
        """The place goes to the client that was served longest ago."""
        while self._waiting:
            client = next(iter(self._waiting))
            line = self._waiting.pop(client)
            place = line.popleft()
            if line:
                self._waiting[client] = line
            if not place.done():
                place.set_result(None)
                return
        self._free += 1

    def _drop(self, client: str, line: deque[asyncio.Future[None]], place: asyncio.Future[None]) -> None:
        if place in line:
            line.remove(place)
        if not line:
            del self._waiting[client]
