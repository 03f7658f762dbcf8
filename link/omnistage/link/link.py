"""One edge to a next stage, over all replicas that it takes.

The router has one to the first stage of an answer; the shell of a stage has one to the next hop. A link opens one of the replicas, sends
what it is given within the credit of the other end, passes credit on, and ends with the handshake `Ended`, half-close, status. When the
replica is lost it opens another one, which goes on exactly where the lost one stopped: this is the only place that knows about replay.

    caller --send--> InputLog (bounded) --credit--> Stream --> replica       on a loss: what the next one needs, again
    caller <--events()-- OutputAccount <----------- Stream <-- replica       on a loss: positions and checkpoints, in Open.resume
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence, Set

import structlog

from omnistage.connector.transport import Sender
from omnistage.link.batches import Batch, chunks_of
from omnistage.link.channel import Channels
from omnistage.link.durations import duration
from omnistage.link.errors import ANOTHER_REPLICA, StageError, is_ok, protocol_error
from omnistage.link.kinds import kind_name
from omnistage.link.limits import MAX_PORTS
from omnistage.link.ports import Output
from omnistage.link.replay import InputLog, OutputAccount, ReplayExpired
from omnistage.link.route import Route
from omnistage.link.stream import OPEN_TIMEOUT_BEHIND_S, OPEN_TIMEOUT_S, Deadline, Metadata, Stream, StreamLost
from omnistage.v1 import stage_pb2

log = structlog.get_logger(__name__)

MAX_UNSENT = 256
"""Pieces that a link holds for a stage without credit; then `send` waits. This is the bound on what text runs ahead of sound."""

REPLAY_BYTES = 64 << 20
"""Bytes that a link keeps of what it sent, for a replay. Beyond it the oldest is forgotten: a loss that needs it is REPLAY_EXPIRED."""

MAX_LOSSES_IN_A_ROW = 3
MAX_LOSSES = 16
"""Losses of one link without a chunk in between, and in all: a request that kills its replicas must end."""

SEARCH_S = 4.0
"""Beyond the patience of the route: time in which replicas that do not answer are asked one after the other. One that gives signs of life
is waited for beyond it."""

FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 0.2
"""Between two rounds through the replicas."""

REOPENED = frozenset({"REPLAY_EXPIRED", "STALE_REFERENCE", "DRAINING"})
"""Ends of an open session after which the stage is opened again."""


class Link:
    """One session at one next stage. Use: `await open()`, then `send`, `grant` and `events()` from different tasks, at last `close()`."""

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
        """request: without route and offers, which the link fills in; with `resume` if the caller itself goes on with a session.
        sender: makes the sender of tensors of one stream. deadline: in time.monotonic() seconds. metadata: trace context to pass on.
        revisions: of the stages that began the session, if another link of the caller's did."""
        self._channels = channels
        self._route = route
        self._stage = kind_name(route.kind)
        self._request = request
        self._new_sender = sender
        self._deadline = Deadline(deadline)
        self._metadata = tuple(metadata)
        self._open_timeout_s = open_timeout_s
        self._max_unsent = max_unsent
        self._replay_bytes = replay_bytes
        self._stream: Stream | None = None
        self._last_sender = Sender(None)
        self._inputs: dict[str, InputLog] = {}
        self._account: OutputAccount | None = None
        self._granted = {credit.port: credit.total for credit in request.credits}
        self._interrupt: stage_pb2.Interrupt | None = None
        self._room = asyncio.Event()
        self._pumping = False
        self._over = False
        self._lost_at: dict[str, float] = {}
        self._silent: set[str] = set()
        self._losses = self._losses_in_a_row = 0
        self._attempts = 0
        self._inline_only = False
        self.needs: Mapping[str, int] = {}
        """First item that the stage needs of each input port; 0 for one that is not named."""
        self.failovers = 0
        self.revisions = revisions
        """Of this stage and all behind it, as of the last Opened."""

    @property
    def address(self) -> str:
        """The replica that has the session now."""
        return self._stream.address if self._stream is not None else ""

    @property
    def silent(self) -> Set[str]:
        """Replicas, of this stage and of all behind it, that were asked and gave no sign of life."""
        return self._silent

    # Opening ---------------------------------------------------------------------------------------------------------------------

    async def open(self) -> stage_pb2.Opened:
        """Open the first replica that takes the session. Nothing is generated before Opened, so trying the next one does no harm."""
        stream = await self._open_somewhere()
        return stream.opened

    async def _open_somewhere(self) -> Stream:
        """Ask the replicas, round after round while it may help. Raises what the last one said."""
        begun = time.monotonic()
        give_up = begun + min(self._route.patience_s, self._deadline.remaining_s)
        pause = FIRST_PAUSE_S
        while True:
            try:
                return await self._open_one(begun + self._route.patience_s + SEARCH_S)
            except StageError as error:
                may_change = (
                    isinstance(error, StreamLost)
                    or error.reason == "DRAINING"
                    or (error.reason == "STAGE_LOST" and self._route.places_anew)
                )
                if not may_change or time.monotonic() + pause > give_up:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _open_one(self, search_until: float) -> Stream:
        """One round, in which only the first is asked after `search_until`. Raises what the last replica said, or at once what no other
        replica would say otherwise."""
        addresses, hops = self._route.place(self._binding)
        failure = StageError("STAGE_LOST", f"no replica of {self._stage} is known", metadata={"stage": self._stage}, retry_delay_s=1.0)
        left = sorted(addresses, key=self._last_resort)
        while left and (len(left) == len(addresses) or time.monotonic() < search_until):
            address = left.pop(0)
            try:
                return await self._open_at(address, hops, left)
            except ReplayExpired:
                raise
            except StageError as error:
                if error.reason not in ANOTHER_REPLICA and not isinstance(error, StreamLost):
                    raise
                if isinstance(error, StreamLost):
                    self._lose(address)
                log.warning("link.open_failed", stage=self._stage, address=address, reason=error.reason, message=error.message)
                failure = self._refused(address, error) if error.reason == "UNAUTHENTICATED" else error
        raise failure

    def _last_resort(self, address: str) -> tuple[bool, float]:
        """The order to ask in: who gives no sign of life comes last, and before those whom this link lost, the latest last."""
        return self._channels.is_quiet(address), self._lost_at.get(address, 0.0)

    def _lose(self, address: str) -> None:
        self._lost_at[address] = time.monotonic()
        self._route.lost(address)
        if self._channels.is_quiet(address):
            self._silent.add(address)

    def _may_hedge(self, others: Sequence[str]) -> bool:
        """Whether an Open that its replica does not answer is withdrawn already: there must be somebody else, and not too many of them."""
        return not all(self._channels.is_quiet(address) for address in others) and self._channels.hedges.take()

    def _refused(self, address: str, error: StageError) -> StageError:
        """What those above hear of a replica that does not take this process's token: for them it is not there, and nothing is wrong with
        what they show."""
        message = f"{self._stage} at {address} refuses its caller: {error.message}"
        return StageError("STAGE_LOST", message, metadata={"stage": self._stage}, retry_delay_s=1.0)

    async def _open_at(self, address: str, hops: Sequence[stage_pb2.Hop], others: Sequence[str]) -> Stream:
        request = self._next_request(hops)
        self._channels.hedges.count_open()
        stream = await Stream.open(
            self._channels,
            self._stage,
            address,
            request,
            Sender(None) if self._inline_only else self._new_sender(),
            self._deadline,
            self._metadata,
            self._open_timeout_s + OPEN_TIMEOUT_BEHIND_S * len(hops),
            lambda: self._may_hedge(others),
        )
        needs = {position.port: position.first for position in stream.opened.needs}
        try:
            for port, inputs in self._inputs.items():
                inputs.restart(needs.get(port, 0))
        except ReplayExpired:
            stream.close()
            raise
        if self._account is None:
            checkpoints = {*request.checkpoints, *(port for hop in hops for port in hop.checkpoints)}
            self._account = OutputAccount(
                checkpoints | self._granted.keys(), checkpoints, request.resume if request.HasField("resume") else None
            )
        self.needs = needs
        self._silent.update(stream.opened.silent)
        self.revisions = tuple(stream.opened.revisions)
        self._stream, self._last_sender = stream, stream.sender
        return stream

    def _next_request(self, hops: Sequence[stage_pb2.Hop]) -> stage_pb2.Open:
        """The first time what the caller gave; later with all that came since."""
        request = stage_pb2.Open()
        request.CopyFrom(self._request)
        request.route.extend(hops)
        request.attempts.append(self._attempts)
        request.batches = True
        self._attempts += 1
        if self._binding:
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
        """Revisions that the next replicas must have: none while nothing of the answer is out."""
        return () if self._account is not None and self._account.empty else self.revisions

    # Down: what the caller sends --------------------------------------------------------------------------------------------------

    def begin_at(self, port: str, first: int) -> None:
        """The input port begins with item `first`: the stage needs nothing before it. Before the first `send` on it."""
        self._inputs[port] = InputLog(port, first)

    async def send(self, output: Output) -> None:
        """Send a piece of a port, or keep it until there is credit; wait while `max_unsent` pieces are kept. A stage that has ended needs
        nothing more: then this does nothing."""
        if self._over:
            return
        inputs = self._inputs.get(output.port)
        if inputs is None:
            inputs = self._inputs[output.port] = InputLog(output.port)
            inputs.restart(self.needs.get(output.port, 0))
        inputs.add(output, self._last_sender)
        await self._pump()
        while self._unsent >= self._max_unsent and not self._over:
            self._room.clear()
            await self._room.wait()

    async def grant(self, port: str, total: int) -> None:
        """Pass credit for an output port of the stage, or of one behind it, on. total: chunks since this link was opened. Raises PROTOCOL
        for too many ports."""
        if total <= self._granted.get(port, 0):
            return
        if port not in self._granted and len(self._granted) >= MAX_PORTS:
            raise protocol_error(f"credit for more than {MAX_PORTS} ports")
        self._granted[port] = total
        stream, account = self._stream, self._account
        if account is not None:
            account.expect(port)
        if stream is not None and account is not None:  # Else it goes with the next Open.
            await stream.write(stage_pb2.RunRequest(credit=_remaining_credit(account, port, total)))

    async def interrupt(self, interrupt: stage_pb2.Interrupt) -> None:
        """Tell the stage to stop producing, and every replica that may follow."""
        self._interrupt = interrupt
        if self._stream is not None:
            await self._stream.write(stage_pb2.RunRequest(interrupt=interrupt))

    @property
    def _unsent(self) -> int:
        return sum(inputs.unsent for inputs in self._inputs.values())

    async def _pump(self) -> None:
        """Write every kept chunk that has credit. Only one task does it at a time; it also sees what others add meanwhile, and goes on with
        another stream when the one that it writes to is replaced."""
        if self._pumping:
            return
        self._pumping = True
        try:
            while (stream := self._stream) is not None and (message := self._next_message(stream)) is not None:
                await stream.write(message)
        finally:
            self._pumping = False

    def _next_message(self, stream: Stream) -> stage_pb2.RunRequest | None:
        """The chunk to be sent now, with those behind it that are small and may go too; None if there is none."""
        batch = Batch(together=stream.opened.batches)
        for port, inputs in self._inputs.items():
            credit = stream.allowance.total(port)
            while (chunk := inputs.peek(stream.sender, credit)) is not None and batch.add(chunk):
                inputs.next_chunk(stream.sender, credit)
                self._room.set()
                self._forget()
            if chunk is not None:
                break
        return batch.put_into(stage_pb2.RunRequest()) if batch else None

    def _forget(self) -> None:
        """Keep within `replay_bytes`: what was sent goes, the oldest first."""
        held = sum(inputs.bytes for inputs in self._inputs.values())
        for inputs in self._inputs.values():
            while held > self._replay_bytes and inputs.can_cut:
                before = inputs.bytes
                inputs.cut()
                held -= before - inputs.bytes

    # Up: what the stage sends -----------------------------------------------------------------------------------------------------

    async def events(self) -> AsyncGenerator[stage_pb2.RunResponse, None]:
        """Chunks and reports, unchanged, until the stage ended well; a Failover for every replica that was lost and replaced on the way.
        Raises StageError for any other end."""
        if self._stream is None:
            raise RuntimeError("events() before open()")
        try:
            while (event := await self._next_event()) is not None:
                yield event
        finally:
            self._end()

    async def _next_event(self) -> stage_pb2.RunResponse | None:
        """What the caller is to have next; None at the end."""
        assert self._stream is not None
        try:
            while True:
                message = await self._stream.read()
                if message.HasField("ended"):
                    await self._stream.finish()
                    if is_ok(message.ended):
                        return None
                    raise StageError.from_ended(message.ended)
                if await self._take(self._stream, message):
                    return message
        except StageError as error:
            return await self._replace(error)

    async def _take(self, stream: Stream, message: stage_pb2.RunResponse) -> bool:
        """Account for a message; whether it is for the caller too."""
        assert self._account is not None
        match message.WhichOneof("event"):
            case "chunk" | "chunks":
                for chunk in chunks_of(message):
                    self._account.accept(chunk)
                self._losses_in_a_row = 0
                return True
            case "report" | "failover":
                return True
            case "credit":
                stream.allowance.grant(message.credit.port, message.credit.total)
                await self._pump()
            case "release":
                stream.sender.release(message.release)
            case "keep":
                if message.keep.port in self._inputs:
                    self._inputs[message.keep.port].keep(message.keep.first)
            case "opened":
                raise protocol_error(f"{self._stage} sent Opened twice", stage=self._stage)
        return False  # Events of a newer stage are ignored, as the contract says.

    # Losing ----------------------------------------------------------------------------------------------------------------------

    async def _replace(self, error: StageError) -> stage_pb2.RunResponse | None:
        """Go on at another replica; the Failover that says so. None if nothing was left to come. Raises what cannot be mended."""
        stream, account = self._stream, self._account
        assert stream is not None and account is not None
        seen = time.monotonic()
        lost = isinstance(error, StreamLost)
        stream.close()
        if lost and account.complete:
            return None
        self._losses += 1
        self._losses_in_a_row += 1
        if not self._may_reopen(error):
            raise error
        self._stream = None
        if lost:
            self._lose(stream.address)
        self._inline_only = self._inline_only or error.reason == "STALE_REFERENCE"
        log.warning("link.lost", stage=self._stage, address=stream.address, reason=error.reason, message=error.message)
        granted = dict(self._granted)
        await self._open_somewhere()
        self.failovers += 1
        await self._catch_up(granted)
        pause = time.monotonic() - seen
        log.info("link.replaced", stage=self._stage, lost=stream.address, address=self.address, pause_s=round(pause, 3))
        return stage_pb2.RunResponse(
            failover=stage_pb2.Failover(
                kind=self._route.kind, lost=stream.address, replica=self.address, reason=error.message, pause=duration(pause)
            )
        )

    def _may_reopen(self, error: StageError) -> bool:
        if self._losses_in_a_row > MAX_LOSSES_IN_A_ROW or self._losses > MAX_LOSSES:
            return False
        if error.reason == "STAGE_LOST":
            return isinstance(error, StreamLost) or self._route.places_anew
        return error.reason in REOPENED

    async def _catch_up(self, granted: Mapping[str, int]) -> None:
        """Send what Open could not say: credit that came since, an interrupt, and the input that is needed again."""
        stream, account = self._stream, self._account
        assert stream is not None and account is not None
        for port, total in tuple(self._granted.items()):  # Others grant while this writes.
            if total != granted.get(port):
                await stream.write(stage_pb2.RunRequest(credit=_remaining_credit(account, port, total)))
        if self._interrupt is not None:
            await stream.write(stage_pb2.RunRequest(interrupt=self._interrupt))
        await self._pump()

    # Closing ----------------------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """End the stream, whatever its state, and give all tensors back. Idempotent."""
        self._end()
        self._stream = None

    def _end(self) -> None:
        """Nobody will read what is sent, or need it again."""
        self._over = True
        self._room.set()
        if self._stream is not None:
            self._stream.close()
        for inputs in self._inputs.values():
            inputs.close()


def _remaining_credit(account: OutputAccount, port: str, total: int) -> stage_pb2.Credit:
    """Credit as the present stream counts it. Never below 0: a checkpoint, which needs no credit, may be further than a caller granted."""
    return stage_pb2.Credit(port=port, total=max(total - account.earlier(port), 0))
