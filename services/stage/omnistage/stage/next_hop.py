"""The rest of the route as one session sees it: a link to the next hop, and the relay of all outputs of later stages to the caller."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import aclosing

from omnistage.connector.transport import Sender
from omnistage.link.channels import Channels
from omnistage.link.link import Link
from omnistage.link.route import FixedRoute
from omnistage.link.stream import Metadata
from omnistage.stage.credit_behind import CreditBehind
from omnistage.stage.opening import CheckedOpen
from omnistage.stage.outbox import Outbox
from omnistage.v1 import chunk_pb2, stage_pb2
from omnistage.wire.batches import chunks_of
from omnistage.wire.ports import Output


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
            ended_ports=(position.port for position in resumption.behind.positions if position.ended),
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
            resume=resumption.behind if resumption.again else None,
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
        """Send the next hop the earlier output of this stage's checkpoint ports, as if it had just been made. Returns the number of the
        item with which each port goes on, for ports that only the next hop gets."""
        takes = self._opening.takes
        begins = {port: self.link.feed.needs.get(port, 0) for port in takes - self._opening.checkpoints}
        for port, first in begins.items():
            self.link.feed.begin_at(port, first)
        for port, chunk in self._opening.resumption.history.items():
            if port in takes:
                await self.link.feed.send(Output(port, chunk.count, _content(chunk), chunk.last))
        return begins

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
    return chunk.text if chunk.HasField("text") else chunk.codes if chunk.HasField("codes") else None
