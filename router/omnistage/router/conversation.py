"""The client's side of one call of Converse: its messages, one turn after the other. `Intake` checks the input that the client streams in a
turn, passes it on to the first stage, and limits it to what memory may hold. `OutputRoom` has the credit that the client gives for output.

    client --chunk--> Intake --send--> link (bounded log) --its credit--> first stage
    client <--credit-- Intake <------- as pieces go down
    client --credit--> OutputRoom --of()--> Generation --its grant--> link ... producer

A client may be WINDOW chunks ahead of what was sent to the stage. The link keeps the last `replay_bytes` of what was sent. While the link
still has all of it, a lost stage is replaced as always. After that the loss of the stage ends the answer, and the client must ask anew. For
an output port without a client's credit the router itself grants chunks as it writes. Checkpoint ports, such as text, need no credit (see
`Run`)."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from typing import Any

import grpc.aio
from google.protobuf.message import DecodeError

from omnistage.link.link import Link
from omnistage.router.pipeline import STREAMED
from omnistage.v1 import chunk_pb2, omni_pb2, stage_pb2
from omnistage.wire.calls import StreamWriter, let_go, look_at_error, write
from omnistage.wire.chunks import Output, PortReader
from omnistage.wire.errors import StageError, bad_request, protocol_error
from omnistage.wire.limits import BYTES, MAX_PORTS, TooLarge, decode
from omnistage.wire.proto_values import duration


class OutputRoom:
    """The room in one conversation. Call `give` when credit comes, `begin` with every turn, and `wrote` after each chunk of the turn."""

    def __init__(self) -> None:
        self._totals: dict[str, int] = {}  # chunks that the client has room for, by port, since the start of the conversation
        self._written_chunks: Counter[str] = Counter()  # chunks that went to the client, since the same start
        self._before: dict[str, int] = {}  # the value of `_written_chunks` when this turn began
        self._unended: set[str] = set()  # ports of this turn that have not ended
        self._changed = asyncio.Event()
        self._dry = asyncio.Event()  # set while a port has no room left

    def give(self, credit: stage_pb2.Credit) -> None:
        """Note that the client has room for `credit.total` chunks of a port, counted from the start of the conversation. Raises PROTOCOL
        for too many ports."""
        if credit.port not in self._totals and len(self._totals) >= MAX_PORTS:
            raise protocol_error(f"credit for more than {MAX_PORTS} ports")
        self._totals[credit.port] = max(self._totals.get(credit.port, 0), credit.total)
        self._wake()

    def begin(self, ports: Iterable[str]) -> None:
        """Begin a turn. ports: the ports of its answer, without checkpoint ports."""
        self._before = dict(self._written_chunks)
        self._unended = set(ports)
        self._wake()

    def of(self, port: str) -> int | None:
        """For how many chunks of a port the client has room, counted from the beginning of this turn; None: the client sets no limit."""
        if port not in self._totals or port not in self._unended:
            return None
        return max(self._totals[port] - self._before.get(port, 0), 0)

    def wrote(self, port: str, *, last: bool) -> None:
        """Note that a chunk went to the client."""
        self._written_chunks[port] += 1
        if last:
            self._unended.discard(port)
        if port in self._totals:
            self._wake()

    @property
    def is_given(self) -> bool:
        """Whether the client gave room for any port."""
        return bool(self._totals)

    @property
    def used_up(self) -> list[str]:
        """Ports of this turn that wait for more room from the client."""
        return sorted(port for port in self._unended if port in self._totals and self._written_chunks[port] >= self._totals[port])

    async def changes(self) -> None:
        """Wait until room was given or used, or a turn began, since the last call. Only one task may call this."""
        await self._changed.wait()
        self._changed.clear()

    async def runs_out(self) -> str:
        """Wait until a port needs more room from the client. Returns the port's name."""
        await self._dry.wait()
        return self.used_up[0]

    def _wake(self) -> None:
        """Wake the tasks that wait in `changes` and `runs_out`."""
        self._changed.set()
        if self.used_up:
            self._dry.set()
        else:
            self._dry.clear()


WINDOW = 16
"""Chunks that a client may be ahead, on all ports of a turn together; each port has at least 2."""

LOOKS = 8
"""How many times the router checks, within the time that a client has for its next chunk, whether that time is over."""
REPLAY_BYTES = 8 << 20
"""Largest number of bytes of streamed input that one turn keeps for a replay."""

ALL_REPLAY_BYTES = 256 << 20
"""Largest number of bytes that all turns of a process keep together; if others keep all of that, a turn keeps nothing."""

Tell = Callable[[stage_pb2.Credit], Coroutine[None, None, None]]


class Intake:
    """The input that the client streams in one turn, by port."""

    def __init__(self, ports: Iterable[stage_pb2.Port], tell: Tell, *, stall_s: float, replay_bytes: int) -> None:
        """ports: ports that the client fills. tell: sends credit to the client. stall_s: seconds that the client may send nothing though it
        has credit. replay_bytes: bytes of input that the link may keep for a replay."""
        self._payloads: Mapping[str, str] = {port.name: STREAMED[port.payload] for port in ports}
        self._readers = {port: PortReader(port) for port in self._payloads}
        self.window = max(WINDOW // max(len(self._readers), 1), 2)
        """Chunks of one port that the client may be ahead."""
        self._tell = tell
        self._stall_s = stall_s
        self._since = time.monotonic()  # when the client last sent a chunk or got room
        self._next_call_due = math.inf  # when `patience_s` is to be called again
        self._link: Link | None = None
        self._interrupt: stage_pb2.Interrupt | None = None
        self._changed = asyncio.Event()
        self.replay_bytes = replay_bytes

    @property
    def waits_for(self) -> list[str]:
        """Ports that have not ended."""
        return sorted(port for port, reader in self._readers.items() if not reader.is_ended)

    @asynccontextmanager
    async def passed_on(self, link: Link) -> AsyncIterator[None]:
        """While the answer runs, pass chunks down this link and give the client room as they go. Later chunks are checked and dropped."""
        self._link = link
        if self._interrupt is not None:
            await link.interrupt(self._interrupt)
        granting = asyncio.create_task(self._grant(link))
        try:
            yield
        except StageError as error:
            raise _for_clients(error, link.stage) from None
        finally:
            self._link = None
            let_go(granting)  # This task fails only if the call is over; then the reader of the call raises the error.

    async def put(self, chunk: chunk_pb2.Chunk) -> None:
        """Check a chunk and send it to the first stage; it is dropped if the answer does not run any more. Raises PROTOCOL or
        CREDIT_EXCEEDED for a chunk that may not come now."""
        self._since = time.monotonic()
        reader = self._readers.get(chunk.port)
        if reader is None:
            raise protocol_error(f"no part of this turn names the port {chunk.port[:32]!r}; there are {sorted(self._readers)}")
        reader.accept(chunk)
        carries = self._payloads[chunk.port]
        payload_kind = chunk.WhichOneof("payload")
        if payload_kind not in (None, carries):
            raise protocol_error(f"port {chunk.port!r} carries {carries}, not {payload_kind}", port=chunk.port)
        if self._link is not None:
            payload = None if payload_kind is None else getattr(chunk, payload_kind)  # The field of this name.
            await self._link.feed.send(Output(chunk.port, chunk.count, payload, chunk.last))

    async def interrupt(self, interrupt: stage_pb2.Interrupt) -> None:
        """Let the stages know that the client wants no more of this answer; if it does not run yet, do so when it runs."""
        self._interrupt = interrupt
        if self._link is not None:
            await self._link.interrupt(interrupt)

    def patience_s(self) -> float | None:
        """Seconds to wait for the client before calling this again; None: for ever, because all ports have ended. Raises CLIENT_STALLED
        if the client could have sent more, and has sent nothing for `stall_s`.

        A process that is stopped or held up reads nothing, for which the client is not to blame. So the caller calls this LOOKS times
        within `stall_s`, and the delay of a late call does not count."""
        now_s = time.monotonic()
        late_s = max(now_s - self._next_call_due, 0.0)
        self._since = min(self._since + late_s, now_s)
        if not self.waits_for:
            self._next_call_due = math.inf
            return None
        wait_s = self._stall_s / LOOKS
        if self._link is not None and any(reader.seq < reader.granted for reader in self._readers.values() if not reader.is_ended):
            remaining_s = self._since + self._stall_s - now_s
            if remaining_s <= 0:
                waiting = ", ".join(self.waits_for)
                raise StageError("CLIENT_STALLED", f"the client sent nothing on {waiting} for {self._stall_s:g} s, though there was room")
            wait_s = min(remaining_s, wait_s)
        self._next_call_due = now_s + wait_s
        return wait_s

    async def _grant(self, link: Link) -> None:
        """Send the client credit for every port now, and more as pieces of the port are sent to the stage."""
        while self.waits_for:
            new_totals = {
                port: link.feed.count_sent(port) + self.window
                for port, reader in self._readers.items()
                if not reader.is_ended and reader.granted - link.feed.count_sent(port) <= self.window // 2
            }
            for port, total in new_totals.items():
                self._readers[port].granted = total
                self._since = time.monotonic()
                telling = asyncio.create_task(self._tell(stage_pb2.Credit(port=port, total=total)))
                telling.add_done_callback(look_at_error)  # Nobody else retrieves the task's error if the shield is cancelled.
                try:
                    await asyncio.shield(telling)  # A write that is cut short ends the stream of writes.
                finally:
                    # The error of this task refers to this frame, and the frame to the task: a cycle, which would stay in memory.
                    del telling
            if not new_totals:
                await link.feed.sends()


def _for_clients(error: StageError, stage: str) -> StageError:
    """The error as a client needs it. REPLAY_EXPIRED becomes STAGE_LOST, because a client knows nothing of a link's log, and asking again
    helps. stage: the name of the first stage."""
    if error.reason != "REPLAY_EXPIRED":
        return error
    message = f"the {stage} was lost after more had been streamed to it than this router keeps ({error.message}): ask and stream it again"
    return StageError("STAGE_LOST", message, metadata={"stage": stage})


MAX_CHUNK_BYTES = max(BYTES["MediaChunk.data"] or 0, BYTES["AudioChunk.data"] or 0) + 1024
"""Largest size in bytes of a message with a chunk, including everything else in the message."""

OF_THE_CALL = frozenset({"PROTOCOL", "CREDIT_EXCEEDED", "HALF_CLOSED"})
"""Errors in the chunks that the client streams; they end the call. After any other error the client may ask another turn."""

DISCARD_S = 1.0
"""Seconds for which the router reads on from a call that is to end, because a client that writes while its call ends would see INTERNAL
instead of the status."""

Context = grpc.aio.ServicerContext[bytes, omni_pb2.ConverseResponse]
"""A call whose requests come as bytes: wire/limits.py makes messages of them."""


Listen = Callable[[], Coroutine[Any, Any, None]]
"""Receives the messages of a client while one turn is answered; see `ConverseCall._listen`."""


class ConverseCall:
    """The messages of one call. For every turn call `next_turn`, `begin` with the intake, and what that returns while the turn is answered;
    at the end call `close`."""

    def __init__(self, context: Context, turn: Callable[[], AbstractAsyncContextManager[None]]) -> None:
        """turn: makes a context manager that is entered while a large message is decoded (Turns.turn)."""
        self._context = context
        self._turn = turn
        self._writer = StreamWriter(partial(write, context))
        self._reading: asyncio.Task[omni_pb2.ConverseRequest | None] | None = None
        self._intake: Intake | None = None
        self._is_answered = False  # whether the present turn has got its Usage
        self._early_turn: omni_pb2.GenerateRequest | None = None  # the next turn, if `_listen` has read it already
        self.room = OutputRoom()
        """Room that the client gives for its answers."""
        self.is_cut = False
        """Whether a write was given up, as when a client does not read its answer: nothing more can be written, and the call must end."""

    # From the client ---------------------------------------------------------------------------------------------------------------------

    async def next_turn(self) -> omni_pb2.GenerateRequest | None:
        """The next turn; None at the half-close. Late messages of the previous turn are checked and dropped. Raises StageError."""
        if self._early_turn is not None:
            request, self._early_turn = self._early_turn, None
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

    def begin(self, intake: Intake) -> Listen:
        """Begin a turn: its chunks go to the intake from now on. Returns what must receive messages while the turn is answered."""
        self._intake = intake
        self._is_answered = False
        return partial(self._listen, intake)

    async def _listen(self, intake: Intake) -> None:
        """Receive messages while a turn is answered. Returns at the half-close, or when the client has its Usage and asks another turn.
        Raises StageError."""
        while True:
            try:
                async with asyncio.timeout(intake.patience_s()):
                    message = await self._receive()
            except TimeoutError:
                continue
            if message is None:
                if waiting := intake.waits_for:
                    raise StageError("HALF_CLOSED", f"the client half-closed before input {waiting} ended")
                if self.room.is_given:
                    raise StageError("HALF_CLOSED", f"the client half-closed and gave too little room for {await self.room.runs_out()}")
                return
            match message.WhichOneof("event"):
                case "chunk":
                    await intake.put(message.chunk)
                case "interrupt":
                    await intake.interrupt(message.interrupt)
                case "turn" if self._is_answered:
                    self._early_turn = message.turn
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
