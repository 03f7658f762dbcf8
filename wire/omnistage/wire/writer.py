"""One writer for one gRPC stream, the way down of a link: a second write before the first returned would fail."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

Message = TypeVar("Message")


class StreamWriter(Generic[Message]):
    """Lets many tasks write to one stream, in the order in which they came.

    A lock and not a queue with a task: a message that nobody competes with is written without a switch of tasks, and whoever writes feels
    the stream's own flow control. The way up has a queue, see `stage/outbox.py`.
    """

    def __init__(self, write: Callable[[Message], Awaitable[None]]) -> None:
        self._write = write
        self._lock = asyncio.Lock()

    async def write(self, message: Message) -> None:
        async with self._lock:
            await self._write(message)

    async def then(self, finish: Callable[[], Awaitable[None]]) -> None:
        """Call `finish` (a half-close) after everything before it was written."""
        async with self._lock:
            await finish()
