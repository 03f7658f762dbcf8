"""One `Run` stream to one replica: open, read, write, and the handshake at the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import grpc.aio

from omnistage.connector.transport import Sender
from omnistage.link.channels import Channels
from omnistage.link.pulse import Attendance
from omnistage.v1 import stage_pb2, stage_pb2_grpc
from omnistage.wire.channel import connect, is_taken
from omnistage.wire.errors import LOST_HERE, Reason, StageError, protocol_error
from omnistage.wire.ports import Allowance
from omnistage.wire.writer import StreamWriter

CONNECT_TIMEOUT_S = 5.0

OPEN_TIMEOUT_S = 30.0
OPEN_TIMEOUT_BEHIND_S = 15.0
"""Time for Opened of a replica that gives signs of life, and of each hop behind it more: the innermost link gives up first, and its error
names the stage that did not answer. A replica that is silent is left much sooner. One that is alone has all the time of the request."""

LOOK_S = 0.2
"""Between two looks whether one that takes too long may be left."""

LAST_S = 0.5
"""So long before the end of the time of a request a silent replica is given up though it is alone: so that the caller hears who it was."""

HANDSHAKE_TIMEOUT_S = 15.0
"""Time for the half-close after Ended: a busy caller still reads what came before. Meanwhile only the stream itself is held."""

Call = grpc.aio.StreamStreamCall[stage_pb2.RunRequest, stage_pb2.RunResponse]
Metadata = Sequence[tuple[str, str]]


class StreamLost(StageError):
    """The replica is gone, as this end of the stream saw: no Ended came and none will."""

    def __init__(self, stage: str, message: str) -> None:
        super().__init__("STAGE_LOST", message, metadata={"stage": stage})

    @property
    def meaning(self) -> Reason:
        return LOST_HERE


class Deadline:
    """The end of a request's time. A link asks it first: what ended at the deadline was not lost."""

    def __init__(self, at: float) -> None:
        """at: in time.monotonic() seconds."""
        self._at = at

    @property
    def remaining_s(self) -> float:
        return max(self._at - time.monotonic(), 0.0)

    @property
    def is_near(self) -> bool:
        """Whether it is time to say what was waited for."""
        return self.remaining_s <= LAST_S

    def silence(self, stage: str, message: str) -> StageError:
        """The error of a stream whose replica was given up by this end."""
        if self.is_near:
            return StageError("DEADLINE", f"{message}, until the time of the request was over", metadata={"stage": stage})
        return self.loss(stage, message)

    def loss(self, stage: str, message: str) -> StageError:
        """The error of a stream that ended without Ended."""
        if self.remaining_s <= 0.01:
            return StageError("DEADLINE", "the deadline of the request has passed", metadata={"stage": stage})
        return StreamLost(stage, message)


class Stream:
    """An open stream. `opened` is the stage's first answer. allowance: credit for what goes down."""

    def __init__(
        self,
        stage: str,
        address: str,
        call: Call,
        sender: Sender,
        deadline: Deadline,
        attendance: Attendance,
        opened: stage_pb2.Opened,
    ) -> None:
        """Use `open`."""
        self._stage = stage
        self._call = call
        self._deadline = deadline
        self._attendance = attendance
        self._writer = StreamWriter(call.write)
        self._ended = False
        self._is_gone = False
        self._silent = ""
        self.address = address
        self.sender = sender
        self.opened = opened
        self.allowance = Allowance()
        attendance.now_tells(self._fall_silent)
        sender.accept(opened.answer, opened.offers)
        for credit in opened.credits:
            self.allowance.grant(credit.port, credit.total)

    @classmethod
    async def open(
        cls,
        channels: Channels,
        stage: str,
        address: str,
        request: stage_pb2.Open,
        sender: Sender,
        deadline: Deadline,
        metadata: Metadata,
        open_timeout_s: float,
        may_hedge: Callable[[], bool],
        is_alone: Callable[[], bool],
    ) -> Stream:
        """Open a session at one replica. may_hedge: asked when the replica gives no sign of life at once; if so, the Open is withdrawn.
        is_alone: asked when it is silent for longer, now and as long as the session runs, or does not answer in time: there is nobody to
        go to, so it is waited for. What ends a process that hangs ends its connection.
        Raises StageError: StreamLost if the replica cannot be reached, is silent or is lost, else what it answered."""
        opened: stage_pb2.Opened | None = None
        call: Call | None = None
        silent = ""
        loop = asyncio.get_running_loop()
        slow = loop.call_later(open_timeout_s, lambda: is_slow())  # noqa: F821  # It is cancelled before that.

        def leave(why: str) -> None:
            nonlocal silent
            silent = why
            _expire(limit)

        def is_slow() -> None:
            nonlocal slow
            slow = loop.call_later(LOOK_S, is_slow)  # noqa: F821
            if not is_alone():
                leave(f"no answer within {open_timeout_s:g} s")

        limit = asyncio.timeout(deadline.remaining_s)
        attendance = channels.pulse(address).attend(leave, may_hedge, lambda: deadline.is_near or not is_alone())
        try:
            async with limit:
                channel = channels.get(address)
                await _connect(channel, address, is_alone)
                shown = (*metadata, *channels.metadata)
                call = stage_pb2_grpc.StageServiceStub(channel).Run(timeout=deadline.remaining_s, metadata=shown, wait_for_ready=False)
                del request.offers[:]
                request.offers.extend(sender.offers())
                opened = await _ask(call, stage, request, deadline)
            return cls(stage, address, call, sender, deadline, attendance, opened)
        except ConnectionError as error:
            lost = f"cannot be reached: {error}"
        except TimeoutError:
            what = "the connection" if call is None else "Open"
            lost = f"did not answer {what}: {silent or f'none within {CONNECT_TIMEOUT_S:g} s'}"
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            lost = f"cannot be reached: {_details(error)}"
        finally:
            slow.cancel()
            del is_slow  # It knows itself, and by whom the request is kept: a cycle.
            if opened is None:
                attendance.leave()
                if call is not None:
                    call.cancel()
                sender.close(clean=True)
                del limit  # It knows the task, which may end with an error of this frame: a cycle that keeps the request.
        raise deadline.silence(stage, f"{stage} {lost}") if silent else deadline.loss(stage, f"{stage} {lost}")

    async def read(self) -> stage_pb2.RunResponse:
        """The next message. Raises StreamLost, DEADLINE, or PROTOCOL for bytes that are no message."""
        try:
            return await _read(self._call, self._stage, self._deadline)
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            self._is_gone = True
            raise self._deadline.loss(self._stage, f"{self._stage} was lost: {_details(error)}") from None
        except asyncio.CancelledError:
            if not self._silent or _is_cancelled():
                raise
            raise self._deadline.silence(self._stage, f"{self._stage} was lost: {self._silent}") from None

    def _fall_silent(self, why: str) -> None:
        """Whoever reads or writes is woken by the end of the call."""
        self._silent = why
        self._call.cancel()

    async def write(self, message: stage_pb2.RunRequest) -> None:
        """Write unless the stage has ended. A stream that is gone is not an error here: who reads sees the same end and says what it means,
        because it alone knows whether Ended came before it."""
        if self._ended:
            return
        try:
            await self._writer.write(message)
        except (grpc.RpcError, asyncio.InvalidStateError):
            return
        except asyncio.CancelledError:
            # A write that waits when this end cancels its call ends so too, and whoever waits for it was not cancelled.
            if _is_cancelled():
                raise

    async def finish(self) -> None:
        """The stage sent Ended: half-close, then wait for the status, which says nothing new."""
        self._ended = True
        await _finish(self._call, self._writer, self._attendance)

    def close(self) -> None:
        """End the stream, whatever its state, and give the memory of its tensors back.

        A session that this end cancels frees its memory at once: what the stage may still make of it can reach nobody. A stream that was
        lost leaves it in quarantine, because a stopped stage may wake and read.
        """
        self._attendance.leave()
        # A call that the other end cancelled counts as cancelled too.
        lost = bool(self._silent) or self._is_gone or (self._call.done() and not self._call.cancelled() and not self._ended)
        if not self._call.done():
            self._call.cancel()
        self.sender.close(clean=not lost)


async def _connect(channel: grpc.aio.Channel, address: str, is_alone: Callable[[], bool]) -> None:
    """As `connect`; as long as it takes where a process is there that takes connections and says nothing, and that is alone."""
    while True:
        try:
            await connect(channel, CONNECT_TIMEOUT_S)
            return
        except (ConnectionError, TimeoutError):
            if not (is_alone() and await is_taken(address)):
                raise
        await asyncio.sleep(LOOK_S)


async def _read(call: Call, stage: str, deadline: Deadline) -> stage_pb2.RunResponse:
    message = await call.read()
    if message is grpc.aio.EOF:
        raise deadline.loss(stage, f"{stage} closed the stream without Ended")
    if not isinstance(message, stage_pb2.RunResponse):  # What grpc.aio gives for bytes that it cannot decode.
        call.cancel()
        raise protocol_error(f"{stage} sent bytes that are no RunResponse", stage=stage)
    return message


async def _ask(call: Call, stage: str, request: stage_pb2.Open, deadline: Deadline) -> stage_pb2.Opened:
    """Send Open and read the answer. Raises what the stage ended with instead."""
    await call.write(stage_pb2.RunRequest(open=request))
    message = await _read(call, stage, deadline)
    if message.HasField("ended"):
        await _finish(call, StreamWriter(call.write))
        raise StageError.from_ended(message.ended)
    if not message.HasField("opened"):
        raise protocol_error(f"{stage} sent {message.WhichOneof('event')} before Opened", stage=stage)
    return message.opened


async def _finish(call: Call, writer: StreamWriter[stage_pb2.RunRequest], attendance: Attendance | None = None) -> None:
    """Half-close and the status. A peer that falls silent now is not waited for: it has said all."""
    limit = asyncio.timeout(HANDSHAKE_TIMEOUT_S)
    if attendance is not None:
        attendance.now_tells(lambda why: _expire(limit))  # noqa: F821  # It tells nothing after `leave`.
    try:
        async with limit:
            await writer.then(call.done_writing)
            await call.code()
    except TimeoutError:
        call.cancel()
    except (grpc.RpcError, grpc.aio.InternalError, asyncio.InvalidStateError):
        return  # The stage did not wait for the half-close, which grpc.aio reports as InternalError.
    finally:
        if attendance is not None:
            attendance.leave()
        del limit  # As in Stream.open.


def _expire(limit: asyncio.Timeout) -> None:
    if not limit.expired():
        limit.reschedule(0.0)


def _is_cancelled() -> bool:
    """Whether somebody cancels this task. Else what looks like it is the end of a call that this process cancelled itself."""
    task = asyncio.current_task()
    return task is None or bool(task.cancelling())


def _details(error: BaseException) -> str:
    return (error.details() or error.code().name) if isinstance(error, grpc.aio.AioRpcError) else "the stream is closed"
