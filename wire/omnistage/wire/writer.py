"""One writer for the gRPC stream from a caller to a stage. gRPC fails a second write that begins before the first write has returned."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

Message = TypeVar("Message")


class StreamWriter(Generic[Message]):
    """Lets many tasks write to one stream, in the order of their calls.

    It has a lock instead of a queue with a task, so a message without competitors is written without a switch of tasks, and a task that
    writes waits as long as the stream's own flow control demands. A stage writes to its caller by a queue, see `stage/outbox.py`.
    """

    def __init__(self, write: Callable[[Message], Awaitable[None]]) -> None:
        self._write = write
        self._lock = asyncio.Lock()

    async def write(self, message: Message) -> None:
        async with self._lock:
            await self._write(message)

    async def then(self, finish: Callable[[], Awaitable[None]]) -> None:
        """Call `finish` (a half-close) after all earlier writes."""
        async with self._lock:
            await finish()
