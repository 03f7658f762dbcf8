"""The other end of one `Run` stream: its messages, the queue of messages to it, and the handshake that closes the stream. The queue has one
writer, which batches small chunks when the stream is slower than the producer."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import grpc.aio
import structlog
from google.protobuf.message import DecodeError

from omnistage.link.stream import HANDSHAKE_TIMEOUT_S
from omnistage.v1 import stage_pb2
from omnistage.wire.calls import let_go, within, write
from omnistage.wire.chunks import Batch, chunks_of
from omnistage.wire.errors import CallerGone, StageError, bad_request, protocol_error
from omnistage.wire.limits import TooLarge, decode

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
        self._written_messages = 0
        """How many of the accepted messages were written; one write may carry several."""
        self._moved = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._new_error: Callable[[], Exception] | None = None
        """Makes the error to raise, once a write has failed; None: no write has failed."""
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
        while self._written_messages < last and self._task is not None:
            await self._move()
        self._check()

    def cancel(self) -> None:
        """Write nothing more."""
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()

    async def _put(self, message: stage_pb2.RunResponse) -> None:
        """Wait for room, and hand the message to the task that writes. Raises as `put`."""
        while len(self._waiting) >= MAX_WAITING and self._new_error is None:
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
        if self._new_error is not None:
            raise self._new_error()

    async def _run(self) -> None:
        """Write messages until none waits, or a write fails."""
        try:
            while self._waiting:
                before = len(self._waiting)
                message = self._next()
                count = before - len(self._waiting)
                self._moved.set()
                await self._write(message)
                self._written_messages += count
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

    def _end(self, new_error: Callable[[], Exception]) -> None:
        self._new_error = new_error
        self._waiting.clear()

    def _next(self) -> stage_pb2.RunResponse:
        """The next message to write: the oldest that waits, together with the chunks right after it if they fit."""
        first = self._waiting.popleft()
        chunks = chunks_of(first)
        batch = Batch(together=self.batches)
        batch.add(*chunks)
        while batch and self._waiting:
            next_chunks = chunks_of(self._waiting[0])
            if not next_chunks or not batch.add(*next_chunks):  # The next message is no chunk, or does not fit.
                break
            self._waiting.popleft()
        return first if len(batch) == len(chunks) else batch.put_into(stage_pb2.RunResponse())


FIRST_MESSAGE_TIMEOUT_S = 30.0
FORWARDED_METADATA = ("traceparent", "tracestate")

Context = grpc.aio.ServicerContext[bytes, stage_pb2.RunResponse]
"""A call whose requests come as bytes: wire/limits.py makes messages of them."""

Taker = Callable[[stage_pb2.RunRequest | None], Awaitable[None]]
"""Called with each message of the caller, one after the other, and with None at the half-close."""


class Caller:
    """One call of `Run`. Call `receive_open`, `read` and `end`, and at the end `close`, whatever has happened.

    deadline: end of the call's time, in time.monotonic() seconds. outbox: messages to the caller.
    """

    def __init__(self, context: Context, limit_s: float) -> None:
        """limit_s: longest time of a call, even if its caller asks for more."""
        self._context = context
        self._reader: asyncio.Task[None] | None = None
        self.ended_well = False
        """Whether the closing handshake is done: the caller reads nothing more."""
        remaining = context.time_remaining()
        self.deadline = time.monotonic() + (limit_s if remaining is None else min(remaining, limit_s))
        self.outbox = Outbox(partial(write, context))

    @property
    def forwarded(self) -> Sequence[tuple[str, str]]:
        """Metadata to pass on to the next hop."""
        return [(key, str(value)) for key, value in self._context.invocation_metadata() or () if key in FORWARDED_METADATA]

    async def receive_open(self) -> stage_pb2.Open:
        """The first message. Raises PROTOCOL if it is not Open or does not come, BAD_REQUEST if it exceeds a limit of limits.py."""
        try:
            async with within(FIRST_MESSAGE_TIMEOUT_S, lambda: protocol_error(f"no Open within {FIRST_MESSAGE_TIMEOUT_S:g} s")):
                message = await self._receive()
        except TooLarge as error:
            raise bad_request(error.field, error.description) from None
        if message is None or message.WhichOneof("event") != "open":
            raise protocol_error("the first message of Run must be Open")
        self.outbox.batches = message.open.batches
        return message.open

    def read(self, take: Taker) -> asyncio.Task[None]:
        """Begin to read. The task ends after the half-close, or with the first error, including one that `take` raises."""
        self._reader = asyncio.create_task(self._read(take))
        return self._reader

    async def _read(self, take: Taker) -> None:
        """Call `take` with every message up to the half-close."""
        while True:
            try:
                message = await self._receive()
            except TooLarge as error:
                raise protocol_error(str(error)) from None
            await take(message)
            if message is None:
                return

    async def end(self, error: StageError | None) -> None:
        """Send Ended, wait for the caller's half-close, then end with the same status. Raises CallerGone; if `error` is None, also the
        error of the outbox."""
        message = stage_pb2.Ended() if error is None else error.to_ended()
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                await self.outbox.put(stage_pb2.RunResponse(ended=message))
                await self.outbox.flush()
                await self._await_half_close()
            self.ended_well = True
        except TimeoutError:
            log.warning("session.no_handshake", why=f"nothing within {HANDSHAKE_TIMEOUT_S:g} s")
        except StageError:  # The outbox has logged why.
            if error is None:
                raise
        if error is not None:
            self._context.set_code(error.code)
            self._context.set_details(error.message)

    async def break_off(self, reason: str) -> None:
        """End the call without Ended, which the caller takes for the loss of this replica. reason: for the status."""
        self.outbox.cancel()
        await self._context.abort(grpc.StatusCode.UNAVAILABLE, reason)  # gRPC's way to end a call is an exception.

    def close(self) -> None:
        """Read and write nothing more. Awaits nothing, so that a second cancellation cannot cut it short."""
        let_go(self._reader)
        # A cancelled task refers to its frames, and they refer to the session and to this object: a cycle, if this object kept the task.
        self._reader = None
        self.outbox.cancel()

    async def _receive(self) -> stage_pb2.RunRequest | None:
        """The next message; None after the half-close. Raises PROTOCOL for bytes that are no message, and TooLarge."""
        data = await self._context.read()
        if data is grpc.aio.EOF:  # type: ignore[comparison-overlap]
            return None
        try:
            return await decode(data, stage_pb2.RunRequest)
        except DecodeError:
            raise protocol_error("these bytes are no RunRequest") from None

    async def _await_half_close(self) -> None:
        """Wait for the caller's half-close: without it, the caller would lose its last writes and the status at the end of the stream."""
        if self._reader is not None:
            await asyncio.wait({self._reader})
        if self._reader is None or self._reader.exception() is not None:
            await self._discard()

    async def _discard(self) -> None:
        """Read up to the half-close, and ignore the messages before it."""
        while True:
            try:
                if await self._receive() is None:
                    return
            except (StageError, TooLarge):
                continue
