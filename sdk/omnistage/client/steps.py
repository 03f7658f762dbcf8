"""A stream of the sync client, read one event at a time from other threads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from omnistage.client.events import Event


class AsyncSteps:
    """Reads an async generator step by step, on the client's loop only. `close` waits until a step that is being cancelled has ended."""

    def __init__(self, events: AsyncGenerator[Event, None]) -> None:
        self._events = events
        self._turn = asyncio.Lock()

    async def next(self) -> Event | None:
        """The next event; None at the end."""
        async with self._turn:
            return await anext(self._events, None)

    async def close(self) -> None:
        """Cancel what is left of the answer."""
        async with self._turn:
            await self._events.aclose()
