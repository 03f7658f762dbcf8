"""The connection to the next stage of a route, through one replica after the other if replicas are lost.

The router has a link to the first stage of an answer; a stage has a link to the next hop. A link opens one of the replicas, sends the input
of its user within the credit of that replica, passes credit on, and ends with the handshake `Ended`, half-close, status. When the replica
is lost, the link opens another one, which goes on exactly where the lost one stopped. Only links replay anything.

    caller --feed--> Feed (bounded) --credit--> Stream --> replica           on a loss: the next replica gets again what it needs
    caller <--events()-- OutputAccount <------- Stream <-- replica           on a loss: positions and checkpoints, in Open.resume
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

import structlog

from omnistage.connector.transport import Sender
from omnistage.link.liveness import Channels, Deadline, Patience, StreamLost
from omnistage.link.replay import MAX_UNSENT, REPLAY_BYTES, Feed, OutputAccount, ReplayExpired
from omnistage.link.search import Route, Search
from omnistage.link.stream import OPEN_TIMEOUT_BEHIND_S, OPEN_TIMEOUT_S, Metadata, Stream
from omnistage.v1 import stage_pb2
from omnistage.wire.chunks import chunks_of
from omnistage.wire.errors import StageError, is_ok, protocol_error
from omnistage.wire.limits import MAX_PORTS
from omnistage.wire.proto_values import duration, kind_name

log = structlog.get_logger(__name__)

MAX_LOSSES_IN_A_ROW = 3
MAX_LOSSES = 16
"""How many losses of one link are allowed without a chunk in between, and in all, because a request that kills its replicas must end."""


class Link:
    """One session at one next stage. Use: `await open()`, then `feed.send`, `grant` and `events()` from different tasks, and `close()` at
    the end. feed: takes the input of the stage. search: `search.silent` lists the replicas that gave no sign of life."""

    def __init__(
        self,
        channels: Channels,
        route: Route,
        request: stage_pb2.Open,
        *,
        sender: Callable[[], Sender] = lambda: Sender(None),
        deadline: float,
        metadata: Metadata = (),
        open_timeout_s: float = OPEN_TIMEOUT_S,
        max_unsent: int = MAX_UNSENT,
        replay_bytes: int = REPLAY_BYTES,
        revisions: Sequence[str] = (),
    ) -> None:
        """request: without route and offers, which the link fills in; with `resume` if the caller itself goes on with a session. sender:
        makes the sender of one stream's tensors. deadline: in time.monotonic() seconds. metadata: trace context to pass on. max_unsent,
        replay_bytes: see Feed. revisions: of the stages that began the session, if an earlier link of the caller opened it; else empty."""
        self._channels = channels
        self._route = route
        self.stage = kind_name(route.kind)
        """The name of the stage in errors."""
        self._request = request
        self._new_sender = sender
        self._deadline = Deadline(deadline)
        self._metadata = tuple(metadata)
        self._open_timeout_s = open_timeout_s
        self.search = Search(channels, route, self._deadline)
        self.feed = Feed(max_unsent, replay_bytes)
        self._stream: Stream | None = None
        self._account: OutputAccount | None = None
        self._granted = {credit.port: credit.total for credit in request.credits}
        self._interrupt: stage_pb2.Interrupt | None = None
        self._losses = _Losses()
        self._attempts = 0  # Opens sent so far
        self._inline_only = False  # whether a replica could not read shared memory
        self.failovers = 0
        self.revisions = revisions
        """Revisions of this stage and all stages after it, as of the last Opened."""

    @property
    def address(self) -> str:
        """The address of the replica that has the session now; empty if none has it."""
        return self._stream.address if self._stream is not None else ""

    # Opening ---------------------------------------------------------------------------------------------------------------------

    async def open(self) -> stage_pb2.Opened:
        """Open the first replica that takes the session. No replica generates anything before Opened, so asking several does no harm."""
        stream = await self.search.find(self._binding, self._open_at)
        return stream.opened

    async def _open_at(self, address: str, hops: Sequence[stage_pb2.Hop], may_hedge: Callable[[], bool]) -> Stream:
        """Open the session at one replica, and make its stream the present one. See search.Ask. Raises StageError."""
        request = self._next_request(hops)
        stream = await Stream.open(
            self._channels,
            self.stage,
            address,
            request,
            Sender(None) if self._inline_only else self._new_sender(),
            self._deadline,
            self._metadata,
            self._open_timeout_s + OPEN_TIMEOUT_BEHIND_S * len(hops),
            may_hedge,
            Patience(
                self.stage,
                address,
                self._deadline,
                lambda: self.search.is_alone(address, self._binding),
                lambda: self._route.describe_process(address),
            ),
        )
        try:
            self.feed.restart(stream)
        except ReplayExpired:
            stream.close()
            raise
        if self._account is None:
            checkpoints = {*request.checkpoints, *(port for hop in hops for port in hop.checkpoints)}
            unwanted = {*request.unwanted, *(port for hop in hops for port in hop.unwanted)}
            expected = (checkpoints | self._granted.keys()) - unwanted
            self._account = OutputAccount(expected, checkpoints, request.resume if request.HasField("resume") else None)
        self.search.silent.update(stream.opened.silent)
        self.revisions = tuple(stream.opened.revisions)
        self._stream = stream
        return stream

    def _next_request(self, hops: Sequence[stage_pb2.Hop]) -> stage_pb2.Open:
        """The Open for the next replica. The first one gets the caller's Open; later ones also get everything that has come since, to go on
        from there."""
        request = stage_pb2.Open()
        request.CopyFrom(self._request)
        request.route.extend(hops)
        request.attempts.append(self._attempts)
        request.batches = True
        self._attempts += 1
        if self._binding:
            # The first revision is the one of this stage, the others are those of the hops.
            request.revision = self._binding[0]
            for hop, revision in zip(request.route, self._binding[1:], strict=False):
                hop.revision = revision
        account = self._account
        if account is None:
            return request
        account.new_stream()
        request.resume.CopyFrom(account.resume())
        del request.credits[:]
        for port, total in self._granted.items():
            if not account.has_ended(port):
                request.credits.append(_remaining_credit(account, port, total))
        return request

    @property
    def _binding(self) -> Sequence[str]:
        """Revisions that the next replicas must have; empty while no output has come, because then any revision will do."""
        return () if self._account is not None and self._account.empty else self.revisions

    # Down: what the caller sends apart from its input -------------------------------------------------------------------------------

    async def grant(self, port: str, total: int) -> None:
        """Pass on credit for an output port of the stage, or of a stage after it. total: chunks since this link was opened. Raises
        PROTOCOL for too many ports."""
        if total <= self._granted.get(port, 0):
            return
        if port not in self._granted and len(self._granted) >= MAX_PORTS:
            raise protocol_error(f"credit for more than {MAX_PORTS} ports")
        self._granted[port] = total
        stream, account = self._stream, self._account
        if account is not None:
            account.expect(port)
        if stream is not None and account is not None:  # Without a stream the credit goes with the next Open.
            await stream.write(stage_pb2.RunRequest(credit=_remaining_credit(account, port, total)))

    async def interrupt(self, interrupt: stage_pb2.Interrupt) -> None:
        """Tell the stage, and every replica that may follow, to stop producing."""
        self._interrupt = interrupt
        if self._stream is not None:
            await self._stream.write(stage_pb2.RunRequest(interrupt=interrupt))

    # Up: what the stage sends -----------------------------------------------------------------------------------------------------

    async def events(self) -> AsyncGenerator[stage_pb2.RunResponse, None]:
        """Yield chunks and reports, unchanged, until the stage ended well, and a Failover for every replica that was lost and replaced
        meanwhile. Raises StageError for any other end."""
        try:
            while (event := await self._next_event()) is not None:
                yield event
        finally:
            self._end()

    async def _next_event(self) -> stage_pb2.RunResponse | None:
        """The next event for the caller, a Failover if the replica was replaced meanwhile; None if the stage ended well. Raises
        StageError."""
        stream, account = self._stream, self._account
        if stream is None or account is None:
            raise RuntimeError("events() before open()")
        try:
            while True:
                message = await stream.read()
                if message.HasField("ended"):
                    await stream.finish()
                    if is_ok(message.ended):
                        return None
                    raise StageError.from_ended(message.ended)
                if await self._take(stream, account, message):
                    return message
        except StageError as error:
            stream.close()
            if isinstance(error, StreamLost) and account.complete:
                return None  # Only the end of the stream is missing.
            self._losses.count()
            if self._losses.too_many or not error.meaning.reopens or not self.search.can_mend(error):
                raise
            return await self._replace(stream, account, error)

    async def _take(self, stream: Stream, account: OutputAccount, message: stage_pb2.RunResponse) -> bool:
        """Do what a message of the stage asks of the link. Return whether the caller gets the message too: True for chunks, reports and
        failovers."""
        match message.WhichOneof("event"):
            case "chunk" | "chunks":
                for chunk in chunks_of(message):
                    account.accept(chunk)
                self._losses.in_a_row = 0
                return True
            case "report" | "failover":
                return True
            case "credit":
                stream.allowance.grant(message.credit.port, message.credit.total)
                await self.feed.pump()
            case "release":
                stream.sender.release(message.release)
            case "keep":
                self.feed.keep(message.keep)
            case "opened":
                raise protocol_error(f"{self.stage} sent Opened twice", stage=self.stage)
        return False  # Events of a newer stage are ignored, as the contract says.

    # Losing ----------------------------------------------------------------------------------------------------------------------

    async def _replace(self, stream: Stream, account: OutputAccount, error: StageError) -> stage_pb2.RunResponse:
        """Go on at another replica after an error that another replica can mend. Return the Failover that reports it."""
        begin_s = time.monotonic()
        self._stream = None
        self.feed.stop()
        if isinstance(error, StreamLost):
            self.search.lose(stream.address)
        self._inline_only = self._inline_only or error.reason == "STALE_REFERENCE"
        log.warning("link.lost", stage=self.stage, address=stream.address, reason=error.reason, message=error.message)
        granted = dict(self._granted)
        successor = await self.search.find(self._binding, self._open_at)
        self.failovers += 1
        await self._catch_up(successor, account, granted)
        pause = time.monotonic() - begin_s
        log.info("link.replaced", stage=self.stage, lost=stream.address, address=self.address, pause_s=round(pause, 3))
        return stage_pb2.RunResponse(
            failover=stage_pb2.Failover(
                kind=self._route.kind, lost=stream.address, replica=self.address, reason=error.message, pause=duration(pause)
            )
        )

    async def _catch_up(self, stream: Stream, account: OutputAccount, granted: Mapping[str, int]) -> None:
        """Send what Open could not carry: credit that came since, an interrupt, and the input that the replica needs again. granted: the
        credit by port, before Open."""
        for port, total in tuple(self._granted.items()):  # Other tasks may grant while this writes.
            if total != granted.get(port):
                await stream.write(stage_pb2.RunRequest(credit=_remaining_credit(account, port, total)))
        if self._interrupt is not None:
            await stream.write(stage_pb2.RunRequest(interrupt=self._interrupt))
        await self.feed.pump()

    # Closing ----------------------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """End the stream, whatever its state, and give all tensors back. Idempotent."""
        self._end()
        self._stream = None

    def _end(self) -> None:
        """End the stream and the feed: nobody reads what is sent, and no replica will need it."""
        if self._stream is not None:
            self._stream.close()
        self.feed.close()


class _Losses:
    """Counts how often a link lost its stage, in all and in a row: without a chunk between two losses."""

    def __init__(self) -> None:
        self.in_a_row = 0
        self._all = 0

    def count(self) -> None:
        self._all += 1
        self.in_a_row += 1

    @property
    def too_many(self) -> bool:
        return self.in_a_row > MAX_LOSSES_IN_A_ROW or self._all > MAX_LOSSES


def _remaining_credit(account: OutputAccount, port: str, total: int) -> stage_pb2.Credit:
    """The credit that the present stream needs: `total`, less the chunks that came on earlier streams. It is never below 0, although more
    chunks may have come than the caller granted: a checkpoint port needs no credit."""
    return stage_pb2.Credit(port=port, total=max(total - account.earlier(port), 0))
