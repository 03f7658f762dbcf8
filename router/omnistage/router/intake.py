"""The input that the client streams in a turn: checked, passed on to the first stage, and limited to what memory may hold.

    client --chunk--> Intake --send--> link (bounded log) --its credit--> first stage
    client <--credit-- Intake <------- as pieces go down

A client may be WINDOW chunks ahead of what was sent to the stage. The link keeps the last `replay_bytes` of what was sent. While the link
still has all of it, a lost stage is replaced as always. After that the loss of the stage ends the answer, and the client must ask anew.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager

from omnistage.link.link import Link
from omnistage.router.pipeline import STREAMED
from omnistage.v1 import chunk_pb2, stage_pb2
from omnistage.wire.errors import StageError, protocol_error
from omnistage.wire.ports import Output, PortReader
from omnistage.wire.tasks import let_go, look_at_error

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
        self._look_at = math.inf  # when the next look is due
        self._link: Link | None = None
        self._interrupt: stage_pb2.Interrupt | None = None
        self._changed = asyncio.Event()
        self.replay_bytes = replay_bytes

    @property
    def waits_for(self) -> list[str]:
        """Ports that have not ended."""
        return sorted(port for port, reader in self._readers.items() if not reader.ended)

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
            payload = None if payload_kind is None else chunk.media if payload_kind == "media" else chunk.audio
            await self._link.feed.send(Output(chunk.port, chunk.count, payload, chunk.last))

    async def interrupt(self, interrupt: stage_pb2.Interrupt) -> None:
        """Let the stages know that the client wants no more of this answer; if it does not run yet, do so when it runs."""
        self._interrupt = interrupt
        if self._link is not None:
            await self._link.interrupt(interrupt)

    def patience_s(self) -> float | None:
        """Seconds to wait for the client before calling this again; None: for ever, because all ports have ended. Raises CLIENT_STALLED
        if the client left room unused for `stall_s`.

        A process that is stopped or held up reads nothing, for which the client is not to blame. So the caller calls this LOOKS times
        within `stall_s`, and the delay of a late call does not count."""
        now_s = time.monotonic()
        self._since = min(self._since + max(now_s - self._look_at, 0.0), now_s)
        if not self.waits_for:
            self._look_at = math.inf
            return None
        wait_s = self._stall_s / LOOKS
        if self._link is not None and any(reader.seq < reader.granted for reader in self._readers.values() if not reader.ended):
            left_s = self._since + self._stall_s - now_s
            if left_s <= 0:
                waiting = ", ".join(self.waits_for)
                raise StageError("CLIENT_STALLED", f"the client sent nothing on {waiting} for {self._stall_s:g} s, though there was room")
            wait_s = min(left_s, wait_s)
        self._look_at = now_s + wait_s
        return wait_s

    async def _grant(self, link: Link) -> None:
        """Send the client credit for every port now, and more as pieces of the port are sent to the stage."""
        while self.waits_for:
            due = {
                port: link.feed.sent(port) + self.window
                for port, reader in self._readers.items()
                if not reader.ended and reader.granted - link.feed.sent(port) <= self.window // 2
            }
            for port, total in due.items():
                self._readers[port].granted = total
                self._since = time.monotonic()
                telling = asyncio.create_task(self._tell(stage_pb2.Credit(port=port, total=total)))
                telling.add_done_callback(look_at_error)  # Nobody else retrieves the task's error if the shield is cancelled.
                try:
                    await asyncio.shield(telling)  # A write that is cut short ends the stream of writes.
                finally:
                    # The error of this task refers to this frame, and the frame to the task: a cycle, which would stay in memory.
                    del telling
            if not due:
                await link.feed.sends()


def _for_clients(error: StageError, stage: str) -> StageError:
    """The error as a client needs it. REPLAY_EXPIRED becomes STAGE_LOST, because a client knows nothing of a link's log, and asking again
    helps. stage: the name of the first stage."""
    if error.reason != "REPLAY_EXPIRED":
        return error
    message = f"the {stage} was lost after more had been streamed to it than this router keeps ({error.message}): ask and stream it again"
    return StageError("STAGE_LOST", message, metadata={"stage": stage})
