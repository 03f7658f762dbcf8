"""One edge to a next stage.

The router has one to the first stage of an answer; the shell of a stage has one to the next hop. A link opens one of the given replicas,
sends what it is given within the credit of the other end, passes credit on, and ends with the handshake `Ended`, half-close, status.

    caller --send--> log (bounded) --credit--> stream --> stage
    caller <------------ events() ------------ stream <-- stage
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import grpc.aio
import structlog

from omnistage.connector.transport import Sender
from omnistage.link.channel import Channels, connect
from omnistage.link.errors import ANOTHER_REPLICA, StageError, is_ok, protocol_error
from omnistage.link.ports import Allowance, Output, PortWriter
from omnistage.link.writer import StreamWriter
from omnistage.v1 import chunk_pb2, stage_pb2, stage_pb2_grpc

log = structlog.get_logger(__name__)

MAX_UNSENT = 256
"""Chunks that a link holds for a stage without credit; then `send` waits. This is the bound on what text runs ahead of sound."""

CONNECT_TIMEOUT_S = 2.0

OPEN_TIMEOUT_S = 10.0
"""Time for Opened of one connected replica and of all hops behind it. A peer that stops meanwhile is found by keepalive, much sooner."""

HANDSHAKE_TIMEOUT_S = 15.0
"""Time for the half-close after Ended. A busy caller still reads what came before it; a dead one is found by keepalive. Nothing but the
stream itself is held meanwhile."""

Call = grpc.aio.StreamStreamCall[stage_pb2.RunRequest, stage_pb2.RunResponse]
Metadata = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Target:
    """Where a link may go. addresses: replicas, best first. stage: what to call it in errors and logs."""

    stage: str
    addresses: Sequence[str]


class Link:
    """One session at one next stage. Use: `await open()`, then `send`, `grant` and `events()` from different tasks, at last `close()`."""

    def __init__(
        self,
        channels: Channels,
        target: Target,
        request: stage_pb2.Open,
        *,
        sender: Sender | None = None,
        deadline: float,
        metadata: Metadata = (),
        open_timeout_s: float = OPEN_TIMEOUT_S,
        max_unsent: int = MAX_UNSENT,
    ) -> None:
        """request: without offers, which the link adds. sender: of tensors; None sends them inline. deadline: in time.monotonic() seconds.
        metadata: trace context to pass on."""
        self._channels = channels
        self._target = target
        self._request = request
        self._sender = sender or Sender(None)
        self._deadline = deadline
        self._metadata = tuple(metadata)
        self._open_timeout_s = open_timeout_s
        self._max_unsent = max_unsent
        self._call: Call | None = None
        self._writer: StreamWriter[stage_pb2.RunRequest] | None = None
        self._ports: dict[str, PortWriter] = {}
        self._unsent: dict[str, deque[chunk_pb2.Chunk]] = {}
        self._unsent_total = 0
        self._room = asyncio.Event()
        self._allowance = Allowance()
        self._pumping = False
        self._ended: stage_pb2.Ended | None = None
        self.address = ""

    # Opening ---------------------------------------------------------------------------------------------------------------------

    async def open(self) -> stage_pb2.Opened:
        """Open the first replica that takes the session. Nothing is generated before Opened, so trying the next one does no harm."""
        failure = StageError("STAGE_LOST", f"no replica of {self._target.stage} is known", metadata={"stage": self._target.stage})
        for address in self._target.addresses:
            try:
                return await self._open_at(address)
            except StageError as error:
                if error.reason not in ANOTHER_REPLICA and error.reason != "STAGE_LOST":
                    raise
                failure = error
                log.warning("link.open_failed", stage=self._target.stage, address=address, reason=error.reason, message=error.message)
        raise failure

    async def _open_at(self, address: str) -> stage_pb2.Opened:
        channel = self._channels.get(address)
        try:
            await connect(channel, min(CONNECT_TIMEOUT_S, self._remaining()))
        except (ConnectionError, TimeoutError) as error:
            raise self._loss(f"{self._target.stage} cannot be reached: {error or 'no answer to the connection'}") from None
        call: Call = stage_pb2_grpc.StageServiceStub(channel).Run(timeout=self._remaining(), metadata=self._metadata, wait_for_ready=False)
        del self._request.offers[:]
        self._request.offers.extend(self._sender.offers())
        try:
            async with asyncio.timeout(min(self._open_timeout_s, self._remaining())):
                await call.write(stage_pb2.RunRequest(open=self._request))
                message = await self._read(call)
        except TimeoutError:
            call.cancel()
            raise self._loss(f"{self._target.stage} did not answer Open within {self._open_timeout_s:g} s") from None
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            raise self._loss(f"{self._target.stage} cannot be reached: {_details(error)}") from None
        except asyncio.CancelledError:
            call.cancel()
            raise
        event = message.WhichOneof("event")
        if event == "ended":
            await self._finish(call)
            raise StageError.from_ended(message.ended)
        if event != "opened":
            call.cancel()
            raise protocol_error(f"{self._target.stage} sent {event} before Opened", stage=self._target.stage)
        self._call, self.address = call, address
        self._writer = StreamWriter(call.write)
        self._sender.accept(message.opened.answer)
        for credit in message.opened.credits:
            self._allowance.grant(credit.port, credit.total)
        return message.opened

    # Down: what the caller sends --------------------------------------------------------------------------------------------------

    async def send(self, output: Output) -> None:
        """Send a piece of a port, or keep it until there is credit; wait while `max_unsent` chunks are kept."""
        port = self._ports.get(output.port)
        if port is None:
            port = self._ports[output.port] = PortWriter(output.port)
            self._unsent[output.port] = deque()
        chunks = port.chunks(output, self._sender)
        self._unsent[output.port].extend(chunks)
        self._unsent_total += len(chunks)
        await self._pump()
        while self._unsent_total >= self._max_unsent and self._ended is None:
            self._room.clear()
            await self._room.wait()

    async def grant(self, port: str, total: int) -> None:
        """Pass credit for an output port of the stage, or of one behind it, on."""
        await self._write(stage_pb2.RunRequest(credit=stage_pb2.Credit(port=port, total=total)))

    async def interrupt(self, interrupt: stage_pb2.Interrupt) -> None:
        await self._write(stage_pb2.RunRequest(interrupt=interrupt))

    async def _pump(self) -> None:
        """Write every kept chunk that has credit. Only one task does it at a time; it also sees what others add meanwhile."""
        if self._pumping:
            return
        self._pumping = True
        try:
            while (chunk := self._next_sendable()) is not None:
                await self._write(stage_pb2.RunRequest(chunk=chunk))
        finally:
            self._pumping = False

    def _next_sendable(self) -> chunk_pb2.Chunk | None:
        for port, unsent in self._unsent.items():
            if unsent and unsent[0].seq < self._allowance.total(port):
                self._unsent_total -= 1
                self._room.set()
                return unsent.popleft()
        return None

    async def _write(self, message: stage_pb2.RunRequest) -> None:
        if self._writer is None or self._ended is not None:
            return  # Not open yet: the credit is in Open. Ended: the stage wants nothing more.
        try:
            await self._writer.write(message)
        except (grpc.RpcError, asyncio.InvalidStateError):
            # The reading side sees the same end and says what it means: it alone knows whether Ended came before it.
            return

    # Up: what the stage sends -----------------------------------------------------------------------------------------------------

    async def events(self) -> AsyncGenerator[stage_pb2.RunResponse, None]:
        """Chunks and reports, unchanged, until the stage ended well. Raises StageError for any other end."""
        call = self._call
        if call is None:
            raise RuntimeError("events() before open()")
        while True:
            try:
                message = await self._read(call)
            except (grpc.RpcError, asyncio.InvalidStateError) as error:
                raise self._loss(f"{self._target.stage} was lost: {_details(error)}") from None
            event = message.WhichOneof("event")
            if event in ("chunk", "report"):
                yield message
            elif event == "credit":
                self._allowance.grant(message.credit.port, message.credit.total)
                await self._pump()
            elif event == "release":
                self._sender.release(message.release)
            elif event == "ended":
                self._ended = message.ended
                self._room.set()
                await self._finish(call)
                if not is_ok(message.ended):
                    raise StageError.from_ended(message.ended)
                return
            elif event == "opened":
                raise protocol_error(f"{self._target.stage} sent Opened twice", stage=self._target.stage)
            # Keep needs a replay log, which this link does not have; events of a newer stage are ignored, as the contract says.

    async def _read(self, call: Call) -> stage_pb2.RunResponse:
        """The stage's next message. Raises the loss where there is none, and PROTOCOL for bytes that are none: grpc.aio gives None then."""
        message = await call.read()
        if message is grpc.aio.EOF:
            raise self._loss(f"{self._target.stage} closed the stream without Ended")
        if not isinstance(message, stage_pb2.RunResponse):
            call.cancel()
            raise protocol_error(f"{self._target.stage} sent bytes that are no RunResponse", stage=self._target.stage)
        return message

    # Closing ----------------------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """End the stream, whatever its state, and give all tensors back. Idempotent.

        A session that this end cancels frees its memory at once: what the stage may still make of it can reach nobody. A stream that was
        lost leaves it in quarantine, because a stopped stage may wake and read.
        """
        call, self._call = self._call, None
        lost = call is not None and call.done() and not call.cancelled() and self._ended is None
        if call is not None and not call.done():
            call.cancel()
        self._sender.close(clean=not lost)

    async def _finish(self, call: Call) -> None:
        """The handshake after Ended: half-close, then wait for the status, which says nothing new."""
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                if self._writer is None:
                    await call.done_writing()
                else:
                    await self._writer.then(call.done_writing)
                await call.code()
        except TimeoutError:
            call.cancel()
        except (grpc.RpcError, grpc.aio.InternalError, asyncio.InvalidStateError):
            return  # The stage did not wait for the half-close, which grpc.aio reports as InternalError.

    def _remaining(self) -> float:
        return max(self._deadline - time.monotonic(), 0.0)

    def _loss(self, message: str) -> StageError:
        """A lost stage; but a link asks its own clock first: what ended at the deadline was not lost."""
        if self._remaining() <= 0.01:
            return StageError("DEADLINE", "the deadline of the request has passed", metadata={"stage": self._target.stage})
        return StageError("STAGE_LOST", message, metadata={"stage": self._target.stage}, retry_delay_s=0.5)


def _details(error: BaseException) -> str:
    return (error.details() or error.code().name) if isinstance(error, grpc.aio.AioRpcError) else "the stream is closed"
