"""The messages of a session to its caller: one queue, one writer, and small chunks batched when the stream is slower than the producer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

import structlog

from omnistage.v1 import stage_pb2
from omnistage.wire.batches import Batch, chunks_of
from omnistage.wire.errors import CallerGone, StageError

log = structlog.get_logger(__name__)

MAX_WAITING = 32
"""Largest number of messages that wait for the writer; at this number `put` waits."""

Write = Callable[[stage_pb2.RunResponse], Awaitable[None]]


class Outbox:
    """Writes messages in the order in which they were put, one at a time, from a task of its own.

    A message that finds the stream idle costs a switch to that task; `put` does not wait for it. Messages that come during a write wait,
    and neighbouring chunks go in one message if the caller accepts that. So a fast producer costs few messages, and the chunks of a slow
    producer never wait for each other.
    """

    def __init__(self, write: Write) -> None:
        self._write = write
        self._waiting: deque[stage_pb2.RunResponse] = deque()
        self._accepted = 0  # messages that were put so far
        self._written = 0
        """How many of the accepted messages were written; one write may carry several."""
        self._moved = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._over: Callable[[], Exception] | None = None
        """Makes the error to raise once a write has failed; None: no write has failed."""
        self.batches = False
        """Whether the caller takes several chunks in one message."""

    async def put(self, message: stage_pb2.RunResponse) -> None:
        """Queue a message for writing; wait while `MAX_WAITING` messages are queued. Raises once a write has failed: CallerGone, or a
        StageError for a bug of this stage."""
        if message.HasField("chunks") and not self.batches:
            for chunk in message.chunks.chunks:
                await self._put(stage_pb2.RunResponse(chunk=chunk))
        else:
            await self._put(message)

    async def flush(self) -> None:
        """Return when all earlier messages were written; later ones are not waited for. Raises as `put`."""
        last = self._accepted
        while self._written < last and self._task is not None:
            await self._move()
        self._check()

    def cancel(self) -> None:
        """Write nothing more."""
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()

    async def _put(self, message: stage_pb2.RunResponse) -> None:
        """Wait for room, and hand the message to the task that writes. Raises as `put`."""
        while len(self._waiting) >= MAX_WAITING and self._over is None:
            await self._move()
        self._check()
        self._waiting.append(message)
        self._accepted += 1
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def _move(self) -> None:
        """Wait until the writer has begun or finished a write, or has ended."""
        self._moved.clear()
        await self._moved.wait()

    def _check(self) -> None:
        """Raise an error if a write has failed. It is a new error each time, because an error that is kept would keep the frames that it
        passed through, and they refer to this outbox."""
        if self._over is not None:
            raise self._over()

    async def _run(self) -> None:
        """Write messages until none waits, or a write fails."""
        try:
            while self._waiting:
                before = len(self._waiting)
                message = self._next()
                count = before - len(self._waiting)
                self._moved.set()
                await self._write(message)
                self._written += count
                self._moved.set()
        except CallerGone:
            self._end(CallerGone)
        # Any other error is a bug, and is logged here: the next `put` or `flush` only points to the log.
        except Exception:
            log.exception("outbox.bug")
            self._end(lambda: StageError("", "a message could not be written; the log of this stage says why"))
        finally:
            self._task = None
            self._moved.set()

    def _end(self, over: Callable[[], Exception]) -> None:
        self._over = over
        self._waiting.clear()

    def _next(self) -> stage_pb2.RunResponse:
        """The next message to write: the oldest that waits, together with the chunks right after it if they fit."""
        first = self._waiting.popleft()
        chunks = chunks_of(first)
        batch = Batch(together=self.batches)
        batch.add(*chunks)
        while batch and self._waiting and (next_chunks := chunks_of(self._waiting[0])) and batch.add(*next_chunks):
            self._waiting.popleft()
        return first if len(batch) == len(chunks) else batch.put_into(stage_pb2.RunResponse())
