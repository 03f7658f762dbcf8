"""The output side of a session: numbers the pieces of every port, keeps to the caller's credit, and sends each piece where it goes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence, Set

import numpy as np

from omnistage.connector.transport import Sender
from omnistage.stage.credit_behind import OUT_OF_CREDIT
from omnistage.stage.next_hop import NextHop
from omnistage.stage.opening import CheckedOpen
from omnistage.stage.outbox import Outbox
from omnistage.v1 import chunk_pb2, stage_pb2, tensor_pb2
from omnistage.wire.ports import Allowance, Output


class Outputs:
    """Sends the output of one session. Call `emit` for each piece, also for the `missing_ends`; then `settle`; and `close` in any case.

    ports: names of all output ports of the stage.
    """

    def __init__(
        self,
        ports: Iterable[stage_pb2.Port],
        opening: CheckedOpen,
        sender: Sender,
        outbox: Outbox,
        next_hop: NextHop | None,
        on_sent: Callable[[float], None] = lambda begun_s: None,
    ) -> None:
        """ports: all output ports of the stage. sender: of tensors to the caller. next_hop: gets the ports that the route names; None: the
        route ends here. on_sent: called when the next hop has accepted a piece; its argument is when the piece was offered, in
        time.monotonic() seconds."""
        self._opening = opening
        self._sender = sender
        self._outbox = outbox
        self._next_hop = next_hop
        self._on_sent = on_sent
        self._payloads = {port.name: port.payload for port in ports}
        self._writers = {port: opening.resumption.writer(port) for port in self._payloads}
        self._begun_at = {port: writer.seq for port, writer in self._writers.items()}  # number of the first chunk in this session
        self._unended = self._writers.keys() - opening.ended
        self._allowance = Allowance()
        self._half_closed = False
        self._released = asyncio.Event()
        self.ports: Set[str] = self._writers.keys()

    # Messages of the caller ----------------------------------------------------------------------------------------------------------

    def offers(self) -> Sequence[tensor_pb2.Offer]:
        """Transports of tensors that the caller may choose from."""
        return self._sender.offers()

    def accept(self, answer: tensor_pb2.Answer) -> None:
        """Apply the caller's choice."""
        self._sender.accept(answer, self._opening.request.offers)

    def grant(self, credit: stage_pb2.Credit) -> None:
        """Add credit for one of `ports`."""
        self._allowance.grant(credit.port, credit.total)

    def release(self, release: tensor_pb2.Release) -> None:
        """Free tensors that the caller has read."""
        self._sender.release(release)
        self._released.set()

    def half_close(self) -> None:
        """No credit and no Release can come any more: a task that waits for credit gets HALF_CLOSED."""
        self._allowance.close("HALF_CLOSED", OUT_OF_CREDIT)
        self._half_closed = True
        self._released.set()

    # Outputs of the logic -------------------------------------------------------------------------------------------------------------

    async def emit(self, output: Output) -> None:
        """Send an output to the caller, to the next hop, or to both. A checkpoint goes to the caller first and is flushed, because it must
        come before the output that the next hop makes from it."""
        if output.last:
            self._unended.discard(output.port)
        down = output.port in self._opening.takes
        mirrored = output.port in self._opening.checkpoints
        if mirrored or not down:
            await self._send_up(output, credited=not mirrored)
        if down and self._next_hop is not None:
            if self._opening.checkpoints:
                await self._outbox.flush()
            begun_s = time.monotonic()
            await self._next_hop.link.feed.send(output)
            self._on_sent(begun_s)

    async def _send_up(self, output: Output, *, credited: bool) -> None:
        """Send an output to the caller. credited: whether it needs the caller's credit, and waits for that."""
        writer, begun_at = self._writers[output.port], self._begun_at[output.port]
        credit = self._allowance.total(output.port)
        if isinstance(output.payload, chunk_pb2.ProgressChunk) and not output.last and writer.seq - begun_at >= credit:
            return  # Progress may be dropped: newer progress follows.
        payload = output.payload
        content = self._sender.pack(payload, element_type=output.element_type) if isinstance(payload, np.ndarray) else payload
        for chunk in writer.chunks(output.count, content, last=output.last):
            if credited:
                await self._allowance.wait(output.port, chunk.seq - begun_at)
            await self._outbox.put(stage_pb2.RunResponse(chunk=chunk))

    def missing_ends(self, *, interrupted: bool) -> Sequence[Output]:
        """The last pieces of the ports that have not ended, because even an interrupted session ends every port. Raises RuntimeError if the
        session was not interrupted and a port has not ended: then the logic has a bug."""
        if self._unended and not interrupted:
            raise RuntimeError(f"the stage ended without the last chunk of port {min(self._unended)!r}")
        interruption = chunk_pb2.TextChunk(finish_reason=chunk_pb2.FINISH_REASON_INTERRUPTED)
        texts = {port for port, payload in self._payloads.items() if payload == stage_pb2.PAYLOAD_TEXT}
        return [Output(port, 0, interruption if port in texts else None, last=True) for port in sorted(self._unended)]

    async def settle(self) -> None:
        """Wait until the caller has given all memory back. After a half-close no Release can come, so the end of the stream frees the
        memory."""
        while self._sender.outstanding and not self._half_closed:
            self._released.clear()
            await self._released.wait()

    def close(self, *, clean: bool) -> None:
        """Give all memory back. clean: the caller has ended in order and reads the memory no more."""
        self._sender.close(clean=clean)
