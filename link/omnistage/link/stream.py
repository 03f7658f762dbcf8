"""One `Run` stream to one replica: open, read, write, and the handshake at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType

import grpc.aio

from omnistage.connector.transport import Sender
from omnistage.link.liveness import Attendance, Channels, Deadline, Patience
from omnistage.v1 import stage_pb2, stage_pb2_grpc
from omnistage.wire.calls import StreamWriter
from omnistage.wire.channel import connect, is_taken
from omnistage.wire.chunks import Allowance
from omnistage.wire.errors import StageError, protocol_error

CONNECT_TIMEOUT_S = 5.0

OPEN_TIMEOUT_S = 30.0
OPEN_TIMEOUT_BEHIND_S = 15.0
"""Seconds in which a replica that gives signs of life must answer Opened, and additional seconds for each stage after it: so the link next
to a stage that does not answer gives up first, and its error names that stage. A silent replica is given up much sooner. The only replica
may use all the time of the request."""

LOOK_S = 0.2
"""Seconds between two checks whether a replica that takes too long may be given up."""

HANDSHAKE_TIMEOUT_S = 15.0
"""Seconds for the half-close after Ended: a busy caller may still read earlier output. Only the stream itself is held so long."""

Call = grpc.aio.StreamStreamCall[stage_pb2.RunRequest, stage_pb2.RunResponse]
Metadata = Sequence[tuple[str, str]]


class Stream:
    """An open `Run` stream to one replica. opened: the first message of the stage. sender: sends tensors to the stage. allowance: the
    credit for chunks to the stage."""

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
        self._is_ended = False
        self._is_gone = False  # whether reading has failed
        self._silent = ""  # why the stream was given up; empty: it was not
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
        patience: Patience,
    ) -> Stream:
        """Open a session at one replica. stage: its name, for errors. open_timeout_s: seconds to answer if another replica can be asked.
        may_hedge: asked when the replica gives no sign of life at once; if true, the Open is withdrawn. patience: asked when the replica is
        silent for longer, now and as long as the session runs, or does not answer in time. Raises StageError: StreamLost if the replica
        cannot be reached, is silent or is lost, else the error with which it answered."""
        opened: stage_pb2.Opened | None = None
        call: Call | None = None
        opening = _Opening(deadline.remaining_s, open_timeout_s, patience)
        attendance = channels.pulses.of(address).attend(opening.give_up, may_hedge, patience)
        try:
            async with opening:
                channel = channels.get(address)
                await _connect(channel, address, patience)
                headers = (*metadata, *channels.metadata)
                call = stage_pb2_grpc.StageServiceStub(channel).Run(timeout=deadline.remaining_s, metadata=headers, wait_for_ready=False)
                del request.offers[:]
                request.offers.extend(sender.offers())
                opened = await _ask(call, stage, request, deadline)
                patience.answers()
            return cls(stage, address, call, sender, deadline, attendance, opened)
        except ConnectionError as error:
            reason = f"cannot be reached: {error}"
        except TimeoutError:
            phase = "the connection" if call is None else "Open"
            reason = f"did not answer {phase}: {opening.reason or f'none within {CONNECT_TIMEOUT_S:g} s'}"
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            reason = f"cannot be reached: {_details(error)}"
        finally:
            if opened is None:
                attendance.leave()
                if call is not None:
                    call.cancel()
                sender.close(clean=True)
        raise deadline.silence(stage, f"{stage} {reason}") if opening.reason else deadline.loss(stage, f"{stage} {reason}")

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
            # Nobody cancels this task: `_fall_silent` has cancelled the call.
            raise self._deadline.silence(self._stage, f"{self._stage} was lost: {self._silent}") from None

    def _fall_silent(self, reason: str) -> None:
        """Cancel the call of a silent replica, which wakes those who read or write. reason: for the error."""
        self._silent = reason
        self._call.cancel()

    async def write(self, message: stage_pb2.RunRequest) -> None:
        """Write unless the stage has ended. A lost stream is no error here, because the reader sees the same end: the reader alone knows
        whether Ended came before, and reports it."""
        if self._is_ended:
            return
        try:
            await self._writer.write(message)
        except (grpc.RpcError, asyncio.InvalidStateError):
            return
        except asyncio.CancelledError:
            # If this end cancels its call, a waiting write raises CancelledError too, although nobody cancelled the waiting task.
            if _is_cancelled():
                raise

    async def finish(self) -> None:
        """Called when the stage has sent Ended: half-close, then wait for the status, which says nothing new."""
        self._is_ended = True
        await _finish(self._call, self._writer, self._attendance)

    def close(self) -> None:
        """End the stream, whatever its state, and give the memory of its tensors back.

        A session that this end cancels frees its memory at once: nobody receives what the stage may still make from that memory. A lost
        stream leaves its memory in quarantine, because a stopped stage may wake and read.
        """
        self._attendance.leave()
        # A call that the other end cancelled counts as cancelled too.
        is_lost = bool(self._silent) or self._is_gone or (self._call.done() and not self._call.cancelled() and not self._is_ended)
        if not self._call.done():
            self._call.cancel()
        self.sender.close(clean=not is_lost)


class _Limit:
    """An asynchronous context manager that raises TimeoutError after `within_s` seconds, or as soon as `give_up` was called. reason: the
    reason given to `give_up`; empty: it was not called.

    It refers to its task only while its block runs. Later that would be a cycle: the task may end with an error whose frame refers to
    this object."""

    def __init__(self, within_s: float) -> None:
        self._timeout: asyncio.Timeout | None = asyncio.timeout(within_s)
        self.reason = ""

    def give_up(self, reason: str) -> None:
        self.reason = reason
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(0.0)

    async def __aenter__(self) -> None:
        assert self._timeout is not None, "it is used once"
        await self._timeout.__aenter__()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._timeout is not None
        timeout, self._timeout = self._timeout, None
        await timeout.__aexit__(kind, error, trace)


class _Opening(_Limit):
    """The limit of one Open. The replica is also given up when its answer takes too long and there is another replica."""

    def __init__(self, within_s: float, answer_s: float, patience: Patience) -> None:
        """within_s: seconds after which the replica is given up in any case. answer_s: seconds after which it is given up for another
        replica."""
        super().__init__(within_s)
        self._answer_s = answer_s
        self._patience = patience
        self._look: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        self._look = asyncio.get_running_loop().call_later(self._answer_s, self._on_late)
        await super().__aenter__()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._look is not None:
            self._look.cancel()
            self._look = None
        await super().__aexit__(kind, error, trace)

    def _on_late(self) -> None:
        """Called when the answer is late: give the replica up if `patience` allows it, else ask `patience` again soon."""
        reason = f"no answer within {self._answer_s:g} s"
        if self._patience.may_leave(reason):
            self.give_up(reason)
        else:
            self._look = asyncio.get_running_loop().call_later(LOOK_S, self._on_late)


async def _connect(channel: grpc.aio.Channel, address: str, patience: Patience) -> None:
    """As `connect`, but without a limit if a process accepts connections there, says nothing, and is the only replica."""
    while True:
        try:
            await connect(channel, CONNECT_TIMEOUT_S)
            return
        except (ConnectionError, TimeoutError):
            if not (patience.is_alone() and await is_taken(address)):
                raise
        await asyncio.sleep(LOOK_S)


async def _read(call: Call, stage: str, deadline: Deadline) -> stage_pb2.RunResponse:
    """The next message of a call. Raises StageError for an end without Ended and for bytes that are no message, and gRPC's own errors."""
    message = await call.read()
    if message is grpc.aio.EOF:
        raise deadline.loss(stage, f"{stage} closed the stream without Ended")
    if not isinstance(message, stage_pb2.RunResponse):  # grpc.aio gives another object for bytes that it cannot decode.
        call.cancel()
        raise protocol_error(f"{stage} sent bytes that are no RunResponse", stage=stage)
    return message


async def _ask(call: Call, stage: str, request: stage_pb2.Open, deadline: Deadline) -> stage_pb2.Opened:
    """Send Open and read the answer. Raises the error with which the stage ended instead."""
    await call.write(stage_pb2.RunRequest(open=request))
    message = await _read(call, stage, deadline)
    if message.HasField("ended"):
        await _finish(call, StreamWriter(call.write))
        raise StageError.from_ended(message.ended)
    if not message.HasField("opened"):
        raise protocol_error(f"{stage} sent {message.WhichOneof('event')} before Opened", stage=stage)
    return message.opened


async def _finish(call: Call, writer: StreamWriter[stage_pb2.RunRequest], attendance: Attendance | None = None) -> None:
    """Half-close the call, then wait for its status: for HANDSHAKE_TIMEOUT_S at most, and no longer once the peer falls silent, because
    nothing more is expected from it."""
    limit = _Limit(HANDSHAKE_TIMEOUT_S)
    if attendance is not None:
        attendance.now_tells(limit.give_up)
    try:
        async with limit:
            await writer.half_close(call.done_writing)
            await call.code()
    except TimeoutError:
        call.cancel()
    except (grpc.RpcError, grpc.aio.InternalError, asyncio.InvalidStateError):
        return  # The stage did not wait for the half-close, which grpc.aio reports as InternalError.
    finally:
        if attendance is not None:
            attendance.leave()


def _is_cancelled() -> bool:
    """Whether another task cancels this one. If not, the CancelledError is the end of a call that this process itself cancelled."""
    task = asyncio.current_task()
    return task is None or bool(task.cancelling())


def _details(error: BaseException) -> str:
    return (error.details() or error.code().name) if isinstance(error, grpc.aio.AioRpcError) else "the stream is closed"
