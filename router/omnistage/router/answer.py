"""One answer: a link to the first stage, with the rest of the pipeline as its route, and a stream of events to the client. The placement
finds the replicas of the route anew for every attempt."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

import structlog

from omnistage.link.link import Link
from omnistage.link.liveness import Channels
from omnistage.link.replay import REPLAY_BYTES
from omnistage.link.search import Outlook
from omnistage.link.stream import Metadata
from omnistage.router.admission import Place
from omnistage.router.callers import name_of, scope_of
from omnistage.router.conversation import Intake, OutputRoom
from omnistage.router.pipeline import StageSpec
from omnistage.router.placement import Placement
from omnistage.router.request import ValidRequest
from omnistage.router.telemetry import Tally
from omnistage.v1 import chunk_pb2, omni_pb2, stage_pb2
from omnistage.wire.calls import let_go, within
from omnistage.wire.chunks import batch_chunks, chunks_of
from omnistage.wire.errors import StageError
from omnistage.wire.proto_values import KINDS, duration

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Hop:
    """A stage after the first one, without its replicas. takes: ports of the stage before it that go into it. checkpoints: its compact
    ports. unwanted: its ports that nobody needs."""

    kind: str
    model: str
    params: stage_pb2.StageParams
    takes: Sequence[str]
    checkpoints: Sequence[str]
    unwanted: Sequence[str]


@dataclass(frozen=True, slots=True)
class PlacedRoute:
    """The Route (link.search) of a link to the first stage, whose replicas the placement chooses. first: kind of the first stage.
    later_hops: the stages after the first."""

    placement: Placement
    first: str
    later_hops: Sequence[Hop]
    places_anew: bool = True

    @property
    def patience_s(self) -> float:
        return self.placement.patience_s

    def outlook(self, revisions: Sequence[str]) -> Outlook:
        kinds = [self.first, *(hop.kind for hop in self.later_hops)]
        return self.placement.outlook(dict(zip_longest(kinds, revisions[: len(kinds)], fillvalue="")))

    @property
    def kind(self) -> stage_pb2.StageKind:
        return KINDS[self.first]

    def place(self, revisions: Sequence[str]) -> tuple[Sequence[str], Sequence[stage_pb2.Hop]]:
        """Addresses of the first stage, and the hops after it, each placed near the best replica of the stage before. revisions: as in
        Route."""
        revision_of = dict(enumerate(revisions))  # By the number of the stage; there may be fewer than stages.
        addresses = self.placement.place(self.first, revision=revision_of.get(0, ""))
        kind_before, address_before = self.first, addresses[0]
        hops = []
        for number, hop in enumerate(self.later_hops, start=1):
            boot_id = self.placement.boot_id(kind_before, address_before)
            best_first = self.placement.place(hop.kind, boot_id=boot_id, revision=revision_of.get(number, ""))
            kind_before, address_before = hop.kind, best_first[0]
            hops.append(
                stage_pb2.Hop(
                    kind=KINDS[hop.kind],
                    model=hop.model,
                    addresses=best_first,
                    params=hop.params,
                    takes=hop.takes,
                    checkpoints=hop.checkpoints,
                    unwanted=hop.unwanted,
                )
            )
        return addresses, hops

    def others(self, address: str, revisions: Sequence[str]) -> Sequence[str]:
        return self.placement.others(self.first, address, revision=next(iter(revisions), ""))

    def note_loss(self, address: str) -> None:
        self.placement.suspect([address])

    def describe_process(self, address: str) -> Mapping[str, object]:
        return self.placement.describe_process(self.first, address)


WINDOW = 32
"""Chunks of one port that may be on their way to a client; the router grants more when half of them were written."""

MAX_TRACESTATE = 512
"""Largest number of characters of `tracestate` that one request may pass on."""

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

Write = Callable[[omni_pb2.GenerateResponse], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class AnswerLimits:
    """The limits of one answer. deadline: in time.monotonic() seconds. stall_s: seconds that a client may leave a written event unread once
    its buffers are full."""

    deadline: float
    stall_s: float


def stall_error(limit_s: float) -> StageError:
    """The error of an answer whose client does not read."""
    return StageError("CLIENT_STALLED", f"the client read nothing for {limit_s:g} s")


class Generation:
    """Runs one request to its end."""

    def __init__(
        self,
        request: ValidRequest,
        descriptions: Mapping[str, stage_pb2.DescribeResponse],
        placement: Placement,
        channels: Channels,
        write: Write,
        limits: AnswerLimits,
        metadata: Metadata,
        place: Place,
        tally: Tally,
        intake: Intake | None = None,
        room: OutputRoom | None = None,
    ) -> None:
        """descriptions: of the stages, by kind. write: sends an event to the client. metadata: passed on to the stages. tally: counts this
        answer alone. intake: receives the chunks that the client streams; None: the client streams nothing. room: how many chunks the
        client has room for; None: the client sets no limit."""
        self._request = request
        self._descriptions = descriptions
        self._placement = placement
        self._channels = channels
        self._write_event = write
        self._limits = limits
        self._metadata = metadata
        self._place = place
        self._tally = tally
        self._intake = intake
        self._room = room
        self._writing_since: float | None = None  # since when the present write waits; None: no write runs
        self._dry_since: float | None = None  # since when a port lacks the client's room; None: no port does
        self._granted: dict[str, int] = {}  # chunks that the stages may send, by port, counted from the start of the answer
        self._handled: dict[str, int] = {}  # chunks that have come, by port; each was written to the client, or dropped
        self._suspected: set[str] = set()  # addresses that were reported to the placement as silent
        self.session_id = secrets.token_hex(16)

    async def run(self) -> None:
        """Ask the stages, and write Started, the chunks and Usage. Raises StageError. In any case the stages stop at the end."""
        link = self._link()
        try:
            opened = await link.open()
            self._tally.opened(link.stage, link.address)
            self._suspect(link)
            started = omni_pb2.Started(
                session_id=self.session_id, model=self._request.pipeline.name, seed=self._request.seed, revisions=opened.revisions
            )
            await self._write(omni_pb2.GenerateResponse(started=started))
            async with AsyncExitStack() as client:
                if self._room is not None:
                    await client.enter_async_context(self._room_passed_on(link, self._room))
                if self._intake is not None:
                    await client.enter_async_context(self._intake.passed_on(link))
                await self._pass_up(link)
            await self._write(omni_pb2.GenerateResponse(usage=self._usage()))
        finally:
            self._suspect(link)
            await link.close()

    async def _pass_up(self, link: Link) -> None:
        """Handle the events of the stages, chunks, reports and failovers, until the stages have ended."""
        async with aclosing(link.events()) as events:
            async for event in events:
                match event.WhichOneof("event"):
                    case "chunk" | "chunks":
                        await self._take(link, chunks_of(event))
                    case "report":
                        self._tally.reported(event.report)
                    case "failover":
                        await self._report_failover(event.failover, link)

    def _suspect(self, link: Link) -> None:
        """Report to the placement, once for each, the replicas that gave no sign of life to this link or to the link of a later stage."""
        self._placement.suspect(link.search.silent - self._suspected)
        self._suspected |= link.search.silent

    async def _report_failover(self, failover: stage_pb2.Failover, link: Link) -> None:
        """Report to the client and the placement that a replica, of the first stage or a later one, was lost and replaced."""
        self._tally.replaced(failover)
        self._placement.suspect([failover.lost])
        self._suspect(link)
        await self._write(omni_pb2.GenerateResponse(failover=failover))

    async def _take(self, link: Link, chunks: Sequence[chunk_pb2.Chunk]) -> None:
        """Pass on the chunks of the ports that the client wants, then grant more."""
        selected = [chunk for chunk in chunks if chunk.port in self._request.outputs]
        self._tally.count_made(chunks)
        self._tally.count_given(selected)
        for event in batch_chunks(selected, omni_pb2.GenerateResponse, together=self._request.batches):
            await self._write(event)
        for chunk in chunks:
            await self._make_room(link, chunk)

    async def _make_room(self, link: Link, chunk: chunk_pb2.Chunk) -> None:
        """Count a chunk that was written or dropped, and grant the stage more chunks of its port if half of the window is used up."""
        port = chunk.port
        if port not in self._granted:
            return  # A checkpoint port needs no credit.
        self._handled[port] += 1
        if self._room is not None and port in self._request.outputs:
            self._room.wrote(port, last=chunk.last)
        if not chunk.last:
            await self._grant(link, port)

    async def _grant(self, link: Link, port: str) -> None:
        """Grant more chunks of a port once half of its window or less is left, as far as the client has room for them."""
        total = self._allowed_chunks(port)
        if self._granted[port] - self._handled[port] <= WINDOW // 2 and total > self._granted[port]:
            self._granted[port] = total
            await link.grant(port, total)

    def _allowed_chunks(self, port: str) -> int:
        """How many chunks of a port the stage may send in all, as of now: WINDOW more than have come, but no more than the client has room
        for."""
        allowed_chunks = self._handled[port] + WINDOW
        room = None if self._room is None else self._room.of(port)
        return allowed_chunks if room is None else min(allowed_chunks, room)

    @asynccontextmanager
    async def _room_passed_on(self, link: Link, room: OutputRoom) -> AsyncIterator[None]:
        """While the answer runs, pass the room that the client gives on to the stages. A client that gives no room counts as one that does
        not read."""

        async def pass_on() -> None:
            while True:
                await room.changes()
                self._dry_since = (self._dry_since or time.monotonic()) if room.used_up else None
                self._note_reading()
                for port in self._granted:
                    await self._grant(link, port)

        passing = asyncio.create_task(pass_on())
        try:
            yield
        finally:
            let_go(passing)  # This task fails only if the stream is over; then the reader of the stream raises the error.
            self._dry_since = None
            self._note_reading()

    def _note_reading(self) -> None:
        """Note in `place.writing_since` since when the client reads nothing or gives no room; None: it reads and gives room."""
        self._place.writing_since = self._writing_since or self._dry_since

    async def _write(self, event: omni_pb2.GenerateResponse) -> None:
        """Write one event. A write returns when the client's buffers have room; if it does not return, the client does not read."""
        self._writing_since = time.monotonic()
        self._note_reading()
        async with within(self._limits.stall_s, partial(stall_error, self._limits.stall_s)):
            await self._write_event(event)
        self._writing_since = None
        self._note_reading()

    # Opening ---------------------------------------------------------------------------------------------------------------------

    def _link(self) -> Link:
        """Make the link to the first stage, which is not opened yet. The link holds the Open for that stage, and its route a hop for each
        later stage."""
        stages = self._needed_stages()
        first, *rest = stages
        unwanted = self._begin_credit(stages)
        request = stage_pb2.Open(
            session_id=self.session_id,
            model=self._descriptions[first.kind].model,
            params=self._request.params[first.kind],
            seed=self._request.seed,
            credits=[stage_pb2.Credit(port=port, total=total) for port, total in self._granted.items()],
            checkpoints=self._checkpoints(first.kind),
            resume=self._request.resume,
            unwanted=unwanted[first.kind],
            client=name_of(self._place.ticket.client),
            scope=scope_of(self._place.ticket.client),
        )
        return Link(
            self._channels,
            PlacedRoute(self._placement, first.kind, [self._hop(stage, unwanted[stage.kind]) for stage in rest]),
            request,
            deadline=self._limits.deadline,
            metadata=self._metadata,
            revisions=self._request.revisions,
            replay_bytes=REPLAY_BYTES if self._intake is None else self._intake.replay_bytes,
        )

    def _begin_credit(self, stages: Sequence[StageSpec]) -> Mapping[str, Sequence[str]]:
        """Set the first credit of every port that comes to the router and needs credit. Returns those of these ports that the client does
        not want, by kind of stage."""
        unwanted: dict[str, list[str]] = {stage.kind: [] for stage in stages}
        for stage in stages:
            for port in self._descriptions[stage.kind].produces:
                goes_to_next_stage = any(port.name in after.takes for after in stages)
                if not port.compact and not goes_to_next_stage:
                    self._handled[port.name] = 0  # Even for an unwanted port: older stages send it all the same.
                    if port.name not in self._request.outputs:
                        unwanted[stage.kind].append(port.name)
        if self._room is not None:
            positions = self._request.resume.positions if self._request.resume is not None else ()
            ended_ports = {position.port for position in positions if position.ended}
            self._room.begin({port for port in self._handled if port in self._request.outputs} - ended_ports)
        self._granted = {port: self._allowed_chunks(port) for port in self._handled}
        return unwanted

    def _needed_stages(self) -> Sequence[StageSpec]:
        """The stages of the pipeline up to the last one that makes an output which the client wants."""
        stages = self._request.pipeline.stages
        wanted_numbers = [
            number
            for number, stage in enumerate(stages)
            if any(port.name in self._request.outputs for port in self._descriptions[stage.kind].produces)
        ]
        return stages[: wanted_numbers[-1] + 1]

    def _checkpoints(self, kind: str) -> list[str]:
        """The names of all compact ports of a stage, wanted or not: with their chunks a replacement repeats exactly what the lost replica
        made."""
        return [port.name for port in self._descriptions[kind].produces if port.compact]

    def _hop(self, stage: StageSpec, unwanted: Sequence[str]) -> Hop:
        """A hop without its addresses, which the route looks up for every attempt."""
        model, params = self._descriptions[stage.kind].model, self._request.params[stage.kind]
        return Hop(stage.kind, model, params, stage.takes, self._checkpoints(stage.kind), unwanted)

    def _usage(self) -> omni_pb2.Usage:
        """The figures of the answer, for the client."""
        tally = self._tally
        usage = omni_pb2.Usage(
            queued=duration(self._place.queued_s), total=duration(time.monotonic() - tally.begun_s), finish_reason=tally.finish_reason
        )
        usage.stages.extend(tally.reports[kind] for kind in sorted(tally.reports))
        if "text" in tally.first:
            usage.first_text.CopyFrom(duration(tally.first["text"]))
        if "audio" in tally.first:
            usage.first_audio.CopyFrom(duration(tally.first["audio"]))
        return usage


def trace_metadata(metadata: Metadata) -> Metadata:
    """The client's W3C trace context; a new one if the client sent none that is well-formed."""
    return incoming_trace(metadata) or [("traceparent", f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01")]


def incoming_trace(metadata: Metadata) -> Metadata:
    """The client's W3C trace context; empty if the client sent none that is well-formed.

    W3C Trace Context, section 3.2: version-traceid-parentid-flags; section 3.3.1.5: pass on at least 512 characters of state. Longer state
    is dropped: metadata that is too long for a hop would look like the loss of a stage."""
    parents = [(key, value) for key, value in metadata if key == "traceparent" and _TRACEPARENT.fullmatch(value)]
    if len(parents) != 1:
        return []
    states = [(key, value) for key, value in metadata if key == "tracestate"]
    state_length = sum(len(value) for _, value in states)
    return parents + states if state_length <= MAX_TRACESTATE else parents
