"""The output side of a session: numbers the pieces of every port, keeps to the caller's credit, and sends each piece where it goes.
`NextHop` is the rest of the route as the session sees it: a link to the next hop, and the relay of all outputs of later stages to the
caller. `CreditBehind` knows how many chunks the later stages may still send to the caller."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import aclosing

import numpy as np

from omnistage.connector.transport import Sender
from omnistage.link.link import Link
from omnistage.link.liveness import Channels
from omnistage.link.search import FixedRoute
from omnistage.link.stream import Metadata
from omnistage.stage.caller import Outbox
from omnistage.stage.opening import CheckedOpen
from omnistage.v1 import chunk_pb2, stage_pb2, tensor_pb2
from omnistage.wire.chunks import Allowance, Output, chunks_of
from omnistage.wire.errors import StageError

OUT_OF_CREDIT = "the caller half-closed and its credit is used up"


class CreditBehind:
    """The caller's credit for the ports of later stages, and the part of it that is used up. It matters only after the caller's half-close,
    when no more credit can come."""

    def __init__(self, uncredited: Iterable[str] = (), ended_ports: Iterable[str] = ()) -> None:
        """uncredited: checkpoint ports, whose chunks need no credit. ended_ports: ports that had ended before this session began."""
        self._uncredited = frozenset(uncredited)
        self._ended_ports = set(ended_ports)
        self._granted: dict[str, int] = {}  # chunks allowed in all, by port that has not ended
        self._relayed: dict[str, int] = {}  # chunks passed on, by port

    def grant(self, credit: stage_pb2.Credit) -> None:
        """Note credit of the caller; `credit.total` counts chunks since the session began."""
        if credit.port not in self._uncredited and credit.port not in self._ended_ports:
            self._granted[credit.port] = max(credit.total, self._granted.get(credit.port, 0))

    def relayed(self, chunk: chunk_pb2.Chunk) -> None:
        """Count a chunk of a later stage that was passed on to the caller."""
        self._relayed[chunk.port] = self._relayed.get(chunk.port, 0) + 1
        if chunk.last:
            self._granted.pop(chunk.port, None)
            self._ended_ports.add(chunk.port)

    def check(self) -> None:
        """Called after the half-close. Raises HALF_CLOSED if the session can never end without more credit. That is so if a port that has
        not ended has used up its credit. It is also so if no port has got credit or ended, because the last stage has at least one port
        that needs credit."""
        credited_ports_ended = self._ended_ports - self._uncredited
        if not self._granted and not credited_ports_ended:
            raise StageError("HALF_CLOSED", OUT_OF_CREDIT)
        for port, total in self._granted.items():
            if self._relayed.get(port, 0) >= total:
                raise StageError("HALF_CLOSED", OUT_OF_CREDIT, metadata={"port": port})


class NextHop:
    """The link of one session to the next hop. Call `open` and `feed`; then `link.feed.send`, `grant`, `link.interrupt` and `relay` from
    different tasks; and `link.close` in any case."""

    def __init__(
        self,
        channels: Channels,
        opening: CheckedOpen,
        own_ports: Set[str],
        *,
        sender: Callable[[], Sender],
        deadline: float,
        metadata: Metadata,
        replay_bytes: int,
        on_lost: Callable[[stage_pb2.Failover], None],
    ) -> None:
        """opening: has a route. own_ports: output ports of this stage; all other ports belong to later stages. on_lost: called when the
        replica of the next hop, not of a later one, was replaced. The other arguments are as in Link."""
        request, resumption = opening.request, opening.resumption
        hop, *rest = request.route
        credits_behind = [credit for credit in request.credits if credit.port not in own_ports]
        self._opening = opening
        self._kind = hop.kind
        self._on_lost = on_lost
        self._half_closed = False
        self._credit = CreditBehind(
            uncredited=(name for each in request.route for name in each.checkpoints),
            ended_ports=(position.port for position in resumption.later_resume.positions if position.ended),
        )
        for credit in credits_behind:
            self._credit.grant(credit)
        opened = stage_pb2.Open(
            session_id=request.session_id,
            model=hop.model,
            params=hop.params,
            seed=request.seed,
            credits=credits_behind,
            revision=hop.revision,
            checkpoints=hop.checkpoints,
            resume=resumption.later_resume if resumption.is_resumed else None,
            attempts=request.attempts,
            unwanted=hop.unwanted,
            client=request.client,
            scope=request.scope,
        )
        self.link = Link(
            channels,
            FixedRoute(hop.kind, hop.addresses, rest),
            opened,
            sender=sender,
            deadline=deadline,
            metadata=metadata,
            replay_bytes=replay_bytes,
        )

    async def open(self) -> Sequence[str]:
        """Open the next hop, which opens the hop after it, and so on; returns the revisions of all of them. Raises StageError."""
        opened = await self.link.open()
        return opened.revisions

    async def feed(self) -> Mapping[str, int]:
        """Send the next hop the earlier output of this stage's checkpoint ports, as if it had just been made. Returns, for each port that
        only the next hop gets, the number of the item with which the port goes on."""
        takes = self._opening.takes
        first_items = {port: self.link.feed.needs.get(port, 0) for port in takes - self._opening.checkpoints}
        for port, first in first_items.items():
            self.link.feed.begin_at(port, first)
        for port, chunk in self._opening.resumption.history.items():
            if port in takes:
                await self.link.feed.send(Output(port, chunk.count, _content(chunk), chunk.last))
        return first_items

    async def grant(self, credit: stage_pb2.Credit) -> None:
        """Pass on the caller's credit for a port of a later stage. Raises PROTOCOL for too many ports."""
        await self.link.grant(credit.port, credit.total)
        self._credit.grant(credit)

    async def relay(self, outbox: Outbox) -> None:
        """Pass everything to the caller, unchanged, until the next hop has ended. Raises the error with which it ended, and HALF_CLOSED if
        it needs more credit, which can no longer come."""
        async with aclosing(self.link.events()) as events:
            async for event in events:
                if event.HasField("failover") and event.failover.kind == self._kind:
                    self._on_lost(event.failover)
                await outbox.put(event)
                for chunk in chunks_of(event):
                    self._credit.relayed(chunk)
                    if self._half_closed:
                        self._credit.check()

    def half_close(self) -> None:
        """Note that the caller can grant nothing more. Raises HALF_CLOSED if more credit is needed."""
        self._half_closed = True
        self._credit.check()


def _content(chunk: chunk_pb2.Chunk) -> chunk_pb2.TextChunk | chunk_pb2.CodeChunk | None:
    """The content of a checkpoint chunk, which is text or codes."""
    if chunk.HasField("text"):
        return chunk.text
    return chunk.codes if chunk.HasField("codes") else None


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
        on_sent: Callable[[float], None] = lambda offered_s: None,
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
        self._first_seqs = {port: writer.seq for port, writer in self._writers.items()}  # number of the first chunk in this session
        self._unended = self._writers.keys() - opening.ended_ports
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
        goes_to_next_hop = output.port in self._opening.takes
        is_checkpoint = output.port in self._opening.checkpoints
        if is_checkpoint or not goes_to_next_hop:
            await self._send_up(output, credited=not is_checkpoint)
        if goes_to_next_hop and self._next_hop is not None:
            if self._opening.checkpoints:
                await self._outbox.flush()
            offered_s = time.monotonic()
            await self._next_hop.link.feed.send(output)
            self._on_sent(offered_s)

    async def _send_up(self, output: Output, *, credited: bool) -> None:
        """Send an output to the caller. credited: whether the output waits for the caller's credit."""
        writer, first_seq = self._writers[output.port], self._first_seqs[output.port]
        has_credit = writer.seq - first_seq < self._allowance.total(output.port)
        if isinstance(output.payload, chunk_pb2.ProgressChunk) and not output.last and not has_credit:
            return  # Progress never waits for credit: newer progress follows.
        payload = output.payload
        content = self._sender.pack(payload, element_type=output.element_type) if isinstance(payload, np.ndarray) else payload
        for chunk in writer.chunks(output.count, content, last=output.last):
            if credited:
                await self._allowance.wait(output.port, chunk.seq - first_seq)
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
