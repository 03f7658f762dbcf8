"""Lets large requests be decoded one at a time. Each client has at most one request in the queue; its other requests wait until that one is
done."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from weakref import WeakValueDictionary

from omnistage.host.places import Client, Places, Refused
from omnistage.router.admission import overload_error
from omnistage.wire.tasks import within

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
