"""One session of a stage: one `Run` stream, from Open to the status, in the environment that all sessions of the process share.

    caller --chunk--> Inputs --> logic --Output--> Outputs --+--> NextHop --> next hop   (ports that the next hop takes)
    caller <-- Outbox <--------------------------------------+    (every other port, and checkpoints, before what was made from them)
    caller <-- Outbox <---- relayed unchanged ------------------- NextHop <-- next hop

Before anything is opened, `prepare` lets the logic check its params; a Thinker also tokenizes its text then. Then there are four tasks: the
reader takes the caller's messages, the producer runs the logic, the relay passes up the messages of the next hop, and the outbox writes all
messages to the caller."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Protocol, TypeVar

import structlog

from omnistage.connector.arena import Arena
from omnistage.connector.transport import Receiver, Sender, transport_name
from omnistage.host.spans import Tracer
from omnistage.link.liveness import Channels
from omnistage.stage.caller import Caller
from omnistage.stage.inputs import Inputs
from omnistage.stage.logic import Kept, StageLogic, Start, Work
from omnistage.stage.opening import CheckedOpen
from omnistage.stage.outputs import NextHop, Outputs
from omnistage.stage.settings import AllowList
from omnistage.stage.telemetry import Meter, SessionTrace
from omnistage.v1 import stage_pb2
from omnistage.wire.calls import cancel, look_at_error, within
from omnistage.wire.chunks import chunks_of
from omnistage.wire.errors import StageError, protocol_error
from omnistage.wire.proto_values import kind_name

log = structlog.get_logger(__name__)

OnPost = Callable[[str, int], None]
"""Called with the name of a tensor's transport and the tensor's size in bytes; see Sender."""


class NewSender(Protocol):
    """Makes a sender of tensors. on_post: called for each tensor."""

    def __call__(self, on_post: OnPost | None = None) -> Sender: ...


class SessionEnvironment:
    """The objects that all sessions of a process share."""

    def __init__(
        self,
        logic: StageLogic,
        description: stage_pb2.DescribeResponse,
        channels: Channels,
        allow_list: AllowList,
        arena: Arena | None,
        *,
        inline_limit: int,
        replay_limit: int,
        session_limit_s: float,
        trusted_uids: Collection[int] = (),
        on_post: OnPost = lambda transport, size: None,
        on_made: Callable[[str, int], None] = lambda port, items: None,
        tracer: Tracer | None = None,
    ) -> None:
        """arena: shared memory for tensors; None: there is none. inline_limit, replay_limit, trusted_uids: see StageSettings. on_post: see
        Sender. session_limit_s: longest session. on_made: called with the port and the number of items whenever items are made. tracer:
        gets a span of every session; None: no spans are made."""
        self.logic = logic
        self.description = description
        self.channels = channels
        self.allow_list = allow_list
        self.arena = arena
        self.inline_limit = inline_limit
        self.replay_limit = replay_limit
        self.session_limit_s = session_limit_s
        self.trusted_uids = frozenset(trusted_uids)
        self._on_post = on_post
        self.tracer = tracer or Tracer()
        self.on_made = on_made
        self.address = ""  # HOST:PORT of this stage, once it listens
        self.kind = kind_name(description.kind)

    def new_senders(self) -> NewSender:
        """Returns the function that makes the senders of one session, which report each tensor to this object's `on_post` too. All senders
        of a session have one share of the arena: the log of a replaced stream stays in use, so the stream after it must not get a second
        share."""
        share = self.arena.share() if self.arena is not None else None

        def new_sender(on_post: OnPost | None = None) -> Sender:
            def posted(transport: str, size: int) -> None:
                self._on_post(transport, size)
                if on_post is not None:
                    on_post(transport, size)

            return Sender(self.arena, inline_limit=self.inline_limit, share=share, on_post=posted)

        return new_sender


T = TypeVar("T")

PASSED = "the deadline of the session has passed"


class Session:
    """One `Run` whose Open was checked. Call `prepare`, then `run`, and `close` in any case."""

    def __init__(self, environment: SessionEnvironment, caller: Caller, opening: CheckedOpen, trace: SessionTrace) -> None:
        description = environment.description
        ports = [port.name for port in description.produces]
        new_sender = environment.new_senders()
        self._environment = environment
        self._caller = caller
        self._trace = trace
        self._superseded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._receiver = Receiver(owners=environment.trusted_uids)
        self._answer = self._receiver.answer(opening.request.offers)
        self._inputs = Inputs(description.accepts, self._receiver, caller.outbox.put)
        self._next_hop: NextHop | None = None
        if opening.request.route:
            self._next_hop = NextHop(
                environment.channels,
                opening,
                set(ports),
                sender=partial(new_sender, trace.posted),
                deadline=caller.deadline,
                metadata=trace.span.metadata,
                replay_bytes=environment.replay_limit,
                on_lost=trace.note_failover,
            )
        self._outputs = Outputs(description.produces, opening, new_sender(), caller.outbox, self._next_hop, trace.note_piece)
        self._interrupted = False
        self._drop_task: asyncio.Task[None] | None = None
        self.opening = opening
        self.meter = Meter(ports, environment.on_made)

    @property
    def transport(self) -> str:
        """The transport of input tensors, for Watch."""
        return transport_name(self._answer.kind)

    # Opening, which may be refused before anything is computed; running; closing ---------------------------------------------------------

    async def prepare(self) -> Work:
        """Let the logic check its params; returns the work to `run`. The check may cost time, so call it only for a session that has a
        place."""
        async with within(self._caller.deadline - time.monotonic(), lambda: StageError("DEADLINE", PASSED), counts_all=True):
            start = self.opening.start({})
            return await self._unless_superseded(self._environment.logic.prepare(self.opening.request, start))

    async def run(self, work: Work) -> None:
        """Open the rest of the route, answer Opened, and work. At its end no work goes on, and it holds no input tensor."""
        try:
            await self._unless_superseded(self._open(work))
            await self._run(work)
        finally:
            self._inputs.close()
            if self._next_hop is not None:
                await self._next_hop.link.close()

    def close(self) -> None:
        """Free the caller's memory that the session holds, and the session's memory that the caller holds. Always called, even for a
        cancelled session; awaits nothing, so that a second cancellation cannot cut it short."""
        self._superseded.cancel()
        # Forget the task: when cancelled it refers to its frames, and they to this object, which would be a cycle.
        self._drop_task = None
        self._receiver.close()
        self._outputs.close(clean=self._caller.ended_well)

    def supersede(self) -> None:
        """End this session with SUPERSEDED: the caller has given it up and opened it again on another stream."""
        if not self._superseded.done():
            self._superseded.set_result(None)

    async def _unless_superseded(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; `work` is cancelled when this session is superseded. Raises SUPERSEDED."""
        working = asyncio.create_task(work)
        futures: set[asyncio.Future[Any]] = {working, self._superseded}
        try:
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise _superseded_error()
            return working.result()
        finally:
            await cancel(working)
            del working, futures  # The error of a task refers to this frame, and the frame to the task: a cycle.

    async def _open(self, work: Work) -> None:
        """Open the next hop, if there is one, then answer Opened."""
        opened = stage_pb2.Opened(
            credits=self._inputs.credits(),
            needs=[stage_pb2.Position(port=port, first=first) for port, first in work.needs.items()],
            revisions=[self._environment.description.revision],
            offers=self._outputs.offers(),
            batches=True,
        )
        if self.opening.resumption.is_resumed:
            self._inputs.go_on_from(work.needs)
        if self._next_hop is not None:
            opened.revisions.extend(await self._next_hop.open())
            opened.silent.extend(self._next_hop.link.search.silent)
        opened.answer.CopyFrom(self._answer)
        for credit in self.opening.request.credits:
            if credit.port in self._outputs.ports:
                self._outputs.grant(credit)
        self.meter.opened()
        await self._caller.outbox.put(stage_pb2.RunResponse(opened=opened))

    # Running ---------------------------------------------------------------------------------------------------------------------------

    async def _run(self, work: Work) -> None:
        """Wait for the producer and the relay; the first error of one of them or of the reader ends the session."""
        reader = self._caller.read(self._take)
        jobs = [asyncio.create_task(self._produce(work))]
        if self._next_hop is not None:
            jobs.append(asyncio.create_task(self._next_hop.relay(self._caller.outbox)))
        waiting: set[asyncio.Future[None]] = {reader, self._superseded, *jobs}
        try:
            while not all(job.done() for job in jobs):
                remaining = self._caller.deadline - time.monotonic()
                done, waiting = await asyncio.wait(waiting, timeout=remaining, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    raise StageError("DEADLINE", PASSED)
                if self._superseded in done:
                    raise _superseded_error()
                for task in done:
                    task.result()
        finally:
            await self._stop(jobs)

    async def _stop(self, jobs: Sequence[asyncio.Task[None]]) -> None:
        """Cancel the jobs and wait for their end. If the caller goes away meanwhile, this wait is cancelled too; the jobs end all the
        same."""
        tasks = [*jobs, self._drop_task] if self._drop_task is not None else list(jobs)
        for task in tasks:
            task.add_done_callback(look_at_error)
        try:
            await cancel(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _produce(self, work: Work) -> None:
        """Run the logic to its end, or to an interrupt; then end all ports, send the report, and wait until the caller has given the memory
        of all tensors back."""
        start = self.opening.start({} if self._next_hop is None else await self._next_hop.feed())
        outbox = self._caller.outbox
        try:
            await self._emit_all(work, start)
        except StageError:
            if not self._interrupted:  # The input of an interrupted session was cut short, and nobody wants its output.
                raise
        for output in self._outputs.missing_ends(interrupted=self._interrupted):
            self.meter.count_output(output)
            await self._outputs.emit(output)
        await outbox.put(stage_pb2.RunResponse(report=self.report()))
        await self._inputs.give_memory_back()
        self._drop_task = asyncio.create_task(self._drop_unread())
        await self._outputs.settle()

    async def _emit_all(self, work: Work, start: Start) -> None:
        """Run the logic and send each of its outputs where it goes; stop at an interrupt."""
        async with aclosing(work.run(self._inputs, self.meter.timing, start)) as outputs:
            async for output in outputs:
                if self._interrupted:
                    return
                if isinstance(output, Kept):
                    await self._caller.outbox.put(stage_pb2.RunResponse(keep=stage_pb2.Keep(port=output.port, first=output.first)))
                    continue
                self.meter.count_output(output)
                await self._outputs.emit(output)

    async def _drop_unread(self) -> None:
        """Drop the input that the logic did not read, so that the caller can go on: its other ports may wait until this input is gone."""
        try:
            async for _ in self._inputs:
                pass
        except StageError as error:
            log.debug("session.rest", reason=error.reason)  # The caller half-closed: nothing more comes.

    def report(self) -> stage_pb2.Report:
        """The figures of this stage up to now."""
        failovers = 0 if self._next_hop is None else self._next_hop.link.failovers
        return self.meter.report(self._environment.description.kind, self._environment.address, self._inputs.items, failovers)

    async def _take(self, message: stage_pb2.RunRequest | None) -> None:
        """Handle a message of the caller, or None, its half-close. Waits only for the next hop, which always reads."""
        if message is None:
            self._inputs.half_close()
            self._outputs.half_close()
            if self._next_hop is not None:
                self._next_hop.half_close()
            return
        match message.WhichOneof("event"):
            case "chunk" | "chunks":
                self._trace.note_input()
                for chunk in chunks_of(message):
                    self._inputs.put(chunk)
            case "credit":
                if message.credit.port in self._outputs.ports:
                    self._outputs.grant(message.credit)
                elif self._next_hop is not None:
                    await self._next_hop.grant(message.credit)
            case "release":
                self._outputs.release(message.release)
            case "answer":
                self._outputs.accept(message.answer)
            case "interrupt":
                self._interrupted = True
                self._inputs.interrupt()
                if self._next_hop is not None:
                    await self._next_hop.link.interrupt(message.interrupt)
            case "open":
                raise protocol_error("Open was sent twice")


def _superseded_error() -> StageError:
    return StageError("SUPERSEDED", "the session was opened again; this end of it was given up")
