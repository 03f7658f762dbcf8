"""The client's side of one call of Converse: its messages, one turn after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from typing import Any

import grpc.aio
from google.protobuf.message import DecodeError

from omnistage.router.intake import Intake
from omnistage.router.room import OutputRoom
from omnistage.v1 import omni_pb2, stage_pb2
from omnistage.wire.calls import write
from omnistage.wire.decoding import TooLarge, decode
from omnistage.wire.durations import duration
from omnistage.wire.errors import StageError, bad_request, protocol_error
from omnistage.wire.limits import BYTES
from omnistage.wire.tasks import let_go
from omnistage.wire.writer import StreamWriter

MAX_CHUNK_BYTES = max(BYTES["MediaChunk.data"] or 0, BYTES["AudioChunk.data"] or 0) + 1024
"""Largest size in bytes of a message with a chunk, including everything else in the message."""

OF_THE_CALL = frozenset({"PROTOCOL", "CREDIT_EXCEEDED", "HALF_CLOSED"})
"""Errors in the chunks that the client streams; they end the call. After any other error the client may ask another turn."""

DISCARD_S = 1.0
"""Seconds for which the router reads on from a call that is to end, because a client that writes while its call ends would see INTERNAL
instead of the status."""

Context = grpc.aio.ServicerContext[bytes, omni_pb2.ConverseResponse]
"""A call whose requests come as bytes: wire/decoding.py makes messages of them."""


class ConverseCall:
    """The messages of one call. For every turn call `next_turn`, `begin` with the intake, and `listen` while the turn is answered; at the
    end call `close`."""

    def __init__(self, context: Context, turn: Callable[[], AbstractAsyncContextManager[None]]) -> None:
        """turn: makes a context manager that is entered while a large message is decoded (Turns.turn)."""
        self._context = context
        self._turn = turn
        self._writer = StreamWriter(partial(write, context))
        self._reading: asyncio.Task[omni_pb2.ConverseRequest | None] | None = None
        self._intake: Intake | None = None
        self._is_answered = False  # whether the present turn has got its Usage
        self._asked: omni_pb2.GenerateRequest | None = None  # the next turn, if `listen` has read it already
        self.room = OutputRoom()
        """Room that the client gives for its answers."""
        self.is_cut = False
        """Whether a write was given up, as when a client does not read its answer: nothing more can be written, and the call must end."""

    # From the client ---------------------------------------------------------------------------------------------------------------------

    async def next_turn(self) -> omni_pb2.GenerateRequest | None:
        """The next turn; None at the half-close. Late messages of the previous turn are checked and dropped. Raises StageError."""
        if self._asked is not None:
            request, self._asked = self._asked, None
            return request
        while (message := await self._receive()) is not None:
            match message.WhichOneof("event"):
                case "turn":
                    self._intake = None
                    return message.turn
                case "interrupt" if self._intake is not None:
                    continue  # The answer was faster than the interrupt.
                case "chunk" if self._intake is not None:
                    await self._intake.put(message.chunk)
                case "credit":
                    self.room.give(message.credit)
                case _:
                    raise protocol_error("the first message of Converse must be a turn")
        return None

    def begin(self, intake: Intake) -> None:
        """Begin a turn: its chunks go to the intake from now on."""
        self._intake = intake
        self._is_answered = False

    async def listen(self) -> None:
        """Receive messages while a turn is answered. Returns at the half-close, or when the client has its Usage and asks another turn.
        Raises StageError."""
        assert self._intake is not None
        while True:
            try:
                async with asyncio.timeout(self._intake.patience_s()):
                    message = await self._receive()
            except TimeoutError:
                continue
            if message is None:
                if waiting := self._intake.waits_for:
                    raise StageError("HALF_CLOSED", f"the client half-closed before input {waiting} ended")
                if self.room.is_given:
                    raise StageError("HALF_CLOSED", f"the client half-closed and gave too little room for {await self.room.runs_out()}")
                return
            match message.WhichOneof("event"):
                case "chunk":
                    await self._intake.put(message.chunk)
                case "interrupt":
                    await self._intake.interrupt(message.interrupt)
                case "turn" if self._is_answered:
                    self._asked = message.turn
                    return
                case "turn":
                    raise protocol_error("a turn came while another one was answered; wait for its Usage or TurnFailed")
                case "credit":
                    self.room.give(message.credit)

    async def _receive(self) -> omni_pb2.ConverseRequest | None:
        """The next message; None after the half-close. If the caller is cancelled, the message is not lost: the next caller gets it."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())
        await asyncio.wait({self._reading})
        reading, self._reading = self._reading, None
        try:
            return reading.result()
        finally:
            # The error of this task refers to this frame, and the frame to the task: a cycle, which would keep the message in memory.
            del reading

    async def _receive_any(self) -> object:
        """As `_receive`, but a StageError is returned, not raised."""
        try:
            return await self._receive()
        except StageError as error:
            return error

    async def _read(self) -> omni_pb2.ConverseRequest | None:
        """Read and decode one message; None after the half-close. Raises StageError."""
        data: Any = await self._context.read()
        if data is grpc.aio.EOF:
            return None
        try:
            message = await decode(data, omni_pb2.ConverseRequest, self._turn)
        except TooLarge as error:
            raise bad_request(error.field, error.description) from None
        except DecodeError:
            raise protocol_error("these bytes are no ConverseRequest") from None
        if message.WhichOneof("event") != "turn" and len(data) > MAX_CHUNK_BYTES:
            raise protocol_error(f"a message of {len(data)} bytes that is no turn; at most {MAX_CHUNK_BYTES}")
        return message

    # To the client -----------------------------------------------------------------------------------------------------------------------

    async def write(self, event: omni_pb2.GenerateResponse) -> None:
        """Write an event of an answer; ConverseResponse has a field of the same name."""
        response = omni_pb2.ConverseResponse()
        name = event.WhichOneof("event")
        assert name is not None
        self._is_answered = name == "usage"
        getattr(response, name).CopyFrom(getattr(event, name))
        try:
            await self._writer.write(response)
        except asyncio.CancelledError:
            self.is_cut = True
            raise

    async def grant(self, credit: stage_pb2.Credit) -> None:
        await self._writer.write(omni_pb2.ConverseResponse(credit=credit))

    async def fail(self, error: StageError) -> None:
        """Tell the client that the turn ended with this error."""
        failed = omni_pb2.TurnFailed(code=error.code.value[0], message=error.message, reason=error.reason, metadata=error.metadata)
        if error.retry_delay_s is not None:
            failed.retry_delay.CopyFrom(duration(error.retry_delay_s))
        await self._writer.write(omni_pb2.ConverseResponse(turn_failed=failed))

    async def discard(self) -> None:
        """Read and drop messages until the client writes nothing more, for DISCARD_S at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_S):
                while await self._receive_any() is not None:
                    pass

    def close(self) -> None:
        """Read nothing more."""
        let_go(self._reading)
        # A cancelled task refers to its frames, and they refer to this object: a cycle, if this object kept the task.
        self._reading = None
