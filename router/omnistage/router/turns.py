"""Lets large requests be decoded one at a time. Each client has at most one request in the queue; its other requests wait until that one is
done."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable
from contextlib import AsyncExitStack, asynccontextmanager
from weakref import WeakValueDictionary

from omnistage.router.admission import overload_error
from omnistage.router.places import Places, Refused
from omnistage.wire.tasks import within

MAX_LARGE = 64
"""Largest number of large requests of all clients together that are being decoded or wait for a turn."""

LARGE_SHARE = 0.75
"""Greatest part of MAX_LARGE that one client may have; see Places."""

TURN_LIMIT_S = 30.0
"""Longest wait for a turn, in seconds."""


class Turns:
    """Gives a turn, the right to decode, to one request at a time, in the order of asking. limit_s: longest wait for a turn, in seconds."""

    def __init__(self, limit_s: float = TURN_LIMIT_S) -> None:
        self._limit_s = limit_s
        self._places = Places(MAX_LARGE, LARGE_SHARE)
        self._turn = asyncio.Lock()  # Held by the request whose turn it is. Both kinds of locks are fair.
        self._of_client: WeakValueDictionary[Hashable, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def turn(self, client: Hashable) -> AsyncIterator[None]:
        """A context manager: wait for a turn, and hold it. Raises OVERLOADED with a delay."""
        try:
            ticket = self._places.take(client)
        except Refused:
            raise overload_error("too many large requests wait to be read") from None
        try:
            async with AsyncExitStack() as held:
                async with within(
                    self._limit_s, lambda: overload_error(f"this large request could not be read within {self._limit_s:g} s")
                ):
                    await held.enter_async_context(self._of_client.setdefault(client, asyncio.Lock()))
                    await held.enter_async_context(self._turn)
                yield
        finally:
            self._places.leave(ticket)
