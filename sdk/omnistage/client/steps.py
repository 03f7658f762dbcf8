"""A stream of the sync client, whose events other threads read one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from omnistage.client.events import Event


class AsyncSteps:
    """Reads an async generator event by event, on the client's loop only. `close` first waits until a running `next` has ended."""

    def __init__(self, events: AsyncGenerator[Event, None]) -> None:
        self._events = events
        self._turn = asyncio.Lock()

    async def next(self) -> Event | None:
        """The next event; None at the end."""
        async with self._turn:
            return await anext(self._events, None)

    async def close(self) -> None:
        """Close the generator, which cancels the rest of the answer."""
        async with self._turn:
            await self._events.aclose()
