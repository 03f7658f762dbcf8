"""One session of a stage: one `Run` stream, from Open to the status.

    caller --chunk--> Inputs --> logic --Output--+--> link --> next hop      (ports that the next hop takes)
    caller <-- Outbox <--------------------------+   (every other port, and checkpoints, before what was made from them)
    caller <-- Outbox <---- relayed unchanged ---------- link <-- next hop

`prepare` has the logic check its params, for a Thinker by making tokens of the text, before anything is opened. Then there are four tasks:
the reader takes what the caller sends, the producer runs the logic, the relay passes up what comes from the next hop, and the outbox writes
what goes up.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import grpc.aio
import numpy as np
import structlog
from google.protobuf.message import DecodeError

from omnistage.connector.transport import Receiver, Sender
from omnistage.link.batches import chunks_of
from omnistage.link.decoding import TooLarge, decoded
from omnistage.link.durations import duration
from omnistage.link.errors import StageError, bad_request, protocol_error
from omnistage.link.limits import MAX_ADDRESSES
from omnistage.link.link import Link
from omnistage.link.ports import Allowance, Output, PortWriter
from omnistage.link.route import FixedRoute
from omnistage.link.stream import HANDSHAKE_TIMEOUT_S
from omnistage.stage.credit_behind import OUT_OF_CREDIT, CreditBehind
from omnistage.stage.environment import SessionEnvironment
from omnistage.stage.inputs import Inputs
from omnistage.stage.logic import Kept, Timing, Work
from omnistage.stage.outbox import Outbox
from omnistage.stage.resumption import Resumption
from omnistage.v1 import chunk_pb2, stage_pb2, tensor_pb2

log = structlog.get_logger(__name__)

T = TypeVar("T")

FIRST_MESSAGE_TIMEOUT_S = 30.0
PASSED = "the deadline of the session has passed"
FORWARDED_METADATA = ("traceparent", "tracestate")

_SESSION_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")

Context = grpc.aio.ServicerContext[bytes, stage_pb2.RunResponse]
"""Of a call whose requests come as bytes: link/decoding.py makes messages of them."""


class Session:
    """One `Run`: `receive_open`, `prepare`, `run`, `end`, and `close` in any case."""

    def __init__(self, environment: SessionEnvironment, context: Context) -> None:
        self._environment = environment
        self._context = context
        self._outbox = Outbox(context.write)
        remaining = context.time_remaining()
        limit = environment.session_limit_s if remaining is None else min(remaining, environment.session_limit_s)
        self._deadline = time.monotonic() + limit
        self._allowance = Allowance()
        self._ports = {port.name: PortWriter(port.name) for port in environment.description.produces}
        self._resumption = Resumption()
        self._begun_at: dict[str, int] = dict.fromkeys(self._ports, 0)
        self._superseded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._share = environment.arena.share() if environment.arena is not None else None
        self._sender = self._new_sender()
        self._receiver = Receiver(owners=environment.trusted_uids)
        self._inputs = Inputs(environment.description.accepts, self._receiver, self._outbox.put)
        self._link: Link | None = None
        self._takes: frozenset[str] = frozenset()
        self._checkpoints: frozenset[str] = frozenset()
        self._timing = Timing()
        self._behind = CreditBehind()
        self._interrupted = False
        self._half_closed = False
        self._released = asyncio.Event()
        self._opened_at = 0.0
        self._first_output_at = 0.0
        self._last_output_at = 0.0
        self._reader: asyncio.Task[None] | None = None
        self._drain: asyncio.Task[None] | None = None
        self._clean = False
        self._answer = tensor_pb2.Answer()
        self._open_ports = set(self._ports)
        self._items: dict[str, int] = dict.fromkeys(self._ports, 0)
        self.request = stage_pb2.Open()

    # Opening may be refused, and nothing was computed then; running; ending -------------------------------------------------------------

    async def receive_open(self) -> None:
        """Read and check the first message."""
        try:
            async with asyncio.timeout(FIRST_MESSAGE_TIMEOUT_S):
                message = await self._receive()
        except TimeoutError:
            raise protocol_error(f"no Open within {FIRST_MESSAGE_TIMEOUT_S:g} s") from None
        except TooLarge as error:
            raise bad_request(error.field, error.description) from None
        if message is None or message.WhichOneof("event") != "open":
            raise protocol_error("the first message of Run must be Open")
        self.request = message.open
        self._outbox.batches = self.request.batches
        structlog.contextvars.bind_contextvars(session_id=self.request.session_id[:64])
        self._check(self.request)
        await self._check_addresses(self.request.route)
        self._answer = self._receiver.answer(self.request.offers)

    async def prepare(self) -> Work:
        """Check the params of the kind, which may cost some time: only for a session that has a place."""
        try:
            async with asyncio.timeout(self._deadline - time.monotonic()):
                return await self._unless_superseded(self._environment.logic.prepare(self.request, self._resumption.start({})))
        except TimeoutError:
            raise StageError("DEADLINE", PASSED) from None

    async def run(self, work: Work) -> None:
        """Open the rest of the route, answer Opened, and work. When it returns or raises, no work is left and no view is held."""
        try:
            await self._unless_superseded(self._open(work))
            await self._run(work)
        finally:
            self._inputs.close()
            if self._link is not None:
                await self._link.close()

    async def end(self, error: StageError | None) -> None:
        """Ended, the caller's half-close, then the same status."""
        ended = stage_pb2.Ended() if error is None else error.ended()
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                await self._outbox.put(stage_pb2.RunResponse(ended=ended))
                await self._outbox.flush()
                await self._await_half_close()
            self._clean = True
        except (TimeoutError, grpc.aio.InternalError) as error_of_stream:
            log.warning("session.no_handshake", why=type(error_of_stream).__name__)
        if error is not None:
            self._context.set_code(error.code)
            self._context.set_details(error.message)

    def close(self) -> None:
        """Free what the stream itself holds. Always called, also for a session that was cancelled; awaits nothing, because a second
        cancellation would cut it short there."""
        if self._reader is not None:
            self._reader.cancel()
            self._reader.add_done_callback(_look_at_error)
        self._superseded.cancel()
        self._outbox.cancel()
        self._receiver.close()
        self._sender.close(clean=self._clean)

    def supersede(self) -> None:
        """The caller gave this session up and has opened it again: whoever still holds this end has no say any more."""
        if not self._superseded.done():
            self._superseded.set_result(None)

    async def _unless_superseded(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns; it is cancelled when this session is superseded. Raises SUPERSEDED."""
        working = asyncio.create_task(work)
        either: set[asyncio.Future[Any]] = {working, self._superseded}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise _superseded()
            return working.result()
        finally:
            await _cancel(working)

    @property
    def attempts(self) -> tuple[int, ...]:
        """The greater, the newer is this Open among those of its session."""
        return tuple(self.request.attempts)

    @property
    def is_again(self) -> bool:
        """The session was begun elsewhere."""
        return self._resumption.again

    @property
    def first_output_s(self) -> float | None:
        """Seconds from Opened to the first output; None if there was none."""
        return self._first_output_at - self._opened_at if self._first_output_at else None

    @property
    def is_cancelled(self) -> bool:
        """The caller is gone: whatever failed then is no bug."""
        return bool(self._context.done())

    @property
    def transport(self) -> str:
        """How input tensors come in, for Watch."""
        return tensor_pb2.TransportKind.Name(self._answer.kind).removeprefix("TRANSPORT_KIND_").lower()

    # Opening ---------------------------------------------------------------------------------------------------------------------------

    def _check(self, request: stage_pb2.Open) -> None:
        description = self._environment.description
        if _SESSION_ID.fullmatch(request.session_id) is None:
            raise bad_request("open.session_id", "must be 1 to 64 characters of A-Z a-z 0-9 _ -")
        if request.model != description.model:
            raise StageError("UNKNOWN_MODEL", f"this stage runs {description.model!r}, not {request.model[:64]!r}")
        if request.revision and request.revision != description.revision:
            raise StageError("REVISION_MISMATCH", f"this replica has revision {description.revision!r}")
        produced = {port.name: port for port in description.produces}
        for name in request.checkpoints:
            if name not in produced or not produced[name].compact:
                raise bad_request("open.checkpoints", f"{name[:32]!r} is not a compact output port of this stage")
        if request.route:
            self._check_route(request.route, produced)
        self._checkpoints = frozenset(request.checkpoints)
        self._resumption = Resumption.of(request, produced)
        for name in (self._takes - self._checkpoints) & self._resumption.positions.keys():
            raise bad_request("resume.positions", f"port {name!r} goes to the next hop only, which says where it goes on")
        self._ports = {port: self._resumption.writer(port) for port in produced}
        self._begun_at = {port: writer.seq for port, writer in self._ports.items()}
        self._open_ports -= self._resumption.ended

    def _check_route(self, route: Sequence[stage_pb2.Hop], produced: dict[str, stage_pb2.Port]) -> None:
        if any(hop.kind not in stage_pb2.StageKind.values() for hop in route):
            raise bad_request("open.route.kind", f"must be one of {stage_pb2.StageKind.keys()[1:]}")
        hop = route[0]
        for name in hop.takes:
            if name not in produced:
                raise bad_request("open.route.takes", f"{name[:32]!r} is not an output port of this stage")
        if not hop.takes:
            raise bad_request("open.route.takes", "the next hop takes no port of this stage")
        if not 1 <= len(hop.addresses) <= MAX_ADDRESSES:
            raise bad_request("open.route.addresses", f"1 to {MAX_ADDRESSES} addresses")
        self._takes = frozenset(hop.takes)

    async def _check_addresses(self, route: Sequence[stage_pb2.Hop]) -> None:
        for address in route[0].addresses if route else ():
            if not await self._environment.allow_list.allows(address):
                raise bad_request("open.route.addresses", f"{address[:64]!r} is not on this stage's allow-list (--allow)")

    async def _open(self, work: Work) -> None:
        opened = stage_pb2.Opened(
            credits=self._inputs.credits(),
            needs=[stage_pb2.Position(port=port, first=first) for port, first in work.needs.items()],
            revisions=[self._environment.description.revision],
            offers=self._sender.offers(),
            batches=True,
        )
        if self._resumption.again:
            self._inputs.go_on_from(work.needs)
        if self.request.route:
            behind = await self._open_next()
            opened.revisions.extend(behind.revisions)
            opened.silent.extend(self._link.silent if self._link is not None else ())
        opened.answer.CopyFrom(self._answer)
        for credit in self.request.credits:
            if credit.port in self._ports:
                self._allowance.grant(credit.port, credit.total)
        self._opened_at = self._last_output_at = time.monotonic()
        await self._outbox.put(stage_pb2.RunResponse(opened=opened))

    async def _open_next(self) -> stage_pb2.Opened:
        hop, *rest = self.request.route
        behind = [credit for credit in self.request.credits if credit.port not in self._ports]
        self._behind = CreditBehind(
            uncredited=(name for hop in self.request.route for name in hop.checkpoints),
            ended=(position.port for position in self._resumption.behind.positions if position.ended),
        )
        for credit in behind:
            self._behind.grant(credit)
        request = stage_pb2.Open(
            session_id=self.request.session_id,
            model=hop.model,
            params=hop.params,
            seed=self.request.seed,
            credits=behind,
            revision=hop.revision,
            checkpoints=hop.checkpoints,
            resume=self._resumption.behind if self._resumption.again else None,
            attempts=self.request.attempts,
        )
        metadata = [(key, str(value)) for key, value in self._context.invocation_metadata() or () if key in FORWARDED_METADATA]
        self._link = Link(
            self._environment.channels,
            FixedRoute(hop.kind, hop.addresses, rest),
            request,
            sender=self._new_sender,
            deadline=self._deadline,
            metadata=metadata,
            replay_bytes=self._environment.replay_limit,
        )
        return await self._link.open()

    def _new_sender(self) -> Sender:
        """All streams of a session have one share of the arena: a replaced one, whose log lives on, must not bring another."""
        return Sender(self._environment.arena, inline_limit=self._environment.inline_limit, share=self._share)

    # Running ---------------------------------------------------------------------------------------------------------------------------

    async def _run(self, work: Work) -> None:
        """Wait for the producer and the relay; the first error of them or of the reader ends the session."""
        self._reader = asyncio.create_task(self._read())
        jobs = [asyncio.create_task(self._produce(work))]
        if self._link is not None:
            jobs.append(asyncio.create_task(self._relay(self._link)))
        waiting: set[asyncio.Future[None]] = {self._reader, self._superseded, *jobs}
        try:
            while not all(job.done() for job in jobs):
                remaining = self._deadline - time.monotonic()
                done, waiting = await asyncio.wait(waiting, timeout=remaining, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    raise StageError("DEADLINE", PASSED)
                if self._superseded in done:
                    raise _superseded()
                for task in done:
                    task.result()
        finally:
            await self._stop(jobs)

    async def _stop(self, jobs: Sequence[asyncio.Task[None]]) -> None:
        """Cancel the jobs. A caller that goes away meanwhile cancels this very wait; the jobs end all the same."""
        tasks = [*jobs, self._drain] if self._drain is not None else list(jobs)
        for task in tasks:
            task.add_done_callback(_look_at_error)
        try:
            await _cancel(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _produce(self, work: Work) -> None:
        start = self._resumption.start(await self._feed_next())
        async with aclosing(work.run(self._inputs, self._timing, start)) as outputs:
            async for output in outputs:
                if self._interrupted:
                    break
                if isinstance(output, Kept):
                    await self._outbox.put(stage_pb2.RunResponse(keep=stage_pb2.Keep(port=output.port, first=output.first)))
                else:
                    await self._emit(output)
        await self._end_ports()
        await self._outbox.put(stage_pb2.RunResponse(report=self._report()))
        await self._inputs.flush()
        self._drain = asyncio.create_task(self._take_the_rest())
        # After a half-close no Release can come: the end of the stream gives the blocks back.
        while self._sender.outstanding and not self._half_closed:
            self._released.clear()
            await self._released.wait()

    async def _take_the_rest(self) -> None:
        """Take input that the logic did not want, so that the caller, whose other ports may wait behind it, can go on."""
        try:
            async for _ in self._inputs:
                pass
        except StageError as error:
            log.debug("session.rest", reason=error.reason)  # Half-closed: nothing more comes.

    async def _feed_next(self) -> dict[str, int]:
        """Give the next hop what was made before as if it had just been made; where the ports that only it gets must go on."""
        link = self._link
        if link is None:
            return {}
        begins = {port: link.needs.get(port, 0) for port in self._takes - self._checkpoints}
        for port, first in begins.items():
            link.begin_at(port, first)
        for port, chunk in self._resumption.history.items():
            if port in self._takes:
                payload = chunk.text if chunk.HasField("text") else chunk.codes if chunk.HasField("codes") else None
                await link.send(Output(port, chunk.count, payload, chunk.last))
        return begins

    async def _emit(self, output: Output) -> None:
        """Up first, and written: a checkpoint must not come later than what is made from it."""
        self._last_output_at = time.monotonic()
        if not self._first_output_at:
            self._first_output_at = self._last_output_at
        self._items[output.port] += output.count
        if output.last:
            self._open_ports.discard(output.port)
        down = output.port in self._takes
        mirrored = output.port in self._checkpoints
        if mirrored or not down:
            await self._send_up(output, credited=not mirrored)
        if down and self._link is not None:
            if self._checkpoints:
                await self._outbox.flush()
            await self._link.send(output)

    async def _send_up(self, output: Output, *, credited: bool) -> None:
        port = self._ports[output.port]
        sent = port.seq - self._begun_at[output.port]
        if isinstance(output.payload, chunk_pb2.ProgressChunk) and not output.last and sent >= self._allowance.total(output.port):
            return  # Progress is droppable: a newer one follows.
        content = self._sender.pack(output.payload) if isinstance(output.payload, np.ndarray) else output.payload
        for chunk in port.chunks(output.count, content, last=output.last):
            if credited:
                await self._allowance.wait(output.port, chunk.seq - self._begun_at[output.port])
            await self._outbox.put(stage_pb2.RunResponse(chunk=chunk))

    async def _end_ports(self) -> None:
        """An interrupted session still ends every port. A logic that ends without ending its ports has a bug."""
        for name in sorted(self._open_ports):
            if not self._interrupted:
                raise RuntimeError(f"the stage ended without the last chunk of port {name!r}")
            payload = chunk_pb2.TextChunk(finish_reason=chunk_pb2.FINISH_REASON_INTERRUPTED) if name == "text" else None
            await self._emit(Output(name, 0, payload, last=True))

    async def _relay(self, link: Link) -> None:
        async with aclosing(link.events()) as events:
            async for event in events:
                await self._outbox.put(event)
                for chunk in chunks_of(event):
                    self._behind.relayed(chunk)
                    if self._half_closed:
                        self._behind.check()

    async def _read(self) -> None:
        """Take what the caller sends until it half-closes. Never waits for anything but the caller and the next hop, which reads always."""
        while True:
            try:
                message = await self._receive()
            except TooLarge as error:
                raise protocol_error(str(error)) from None
            if message is None:
                self._inputs.half_close()
                self._allowance.close(StageError("HALF_CLOSED", OUT_OF_CREDIT))
                self._half_closed = True
                self._released.set()
                if self._link is not None:
                    self._behind.check()
                return
            match message.WhichOneof("event"):
                case "chunk" | "chunks":
                    for chunk in chunks_of(message):
                        self._inputs.put(chunk)
                case "credit":
                    await self._grant(message.credit)
                case "release":
                    self._sender.release(message.release)
                    self._released.set()
                case "answer":
                    self._sender.accept(message.answer, self.request.offers)
                case "interrupt":
                    self._interrupted = True
                    self._inputs.interrupt()
                    if self._link is not None:
                        await self._link.interrupt(message.interrupt)
                case "open":
                    raise protocol_error("Open was sent twice")

    async def _grant(self, credit: stage_pb2.Credit) -> None:
        if credit.port in self._ports:
            self._allowance.grant(credit.port, credit.total)
        elif self._link is not None:
            await self._link.grant(credit.port, credit.total)
            self._behind.grant(credit)

    def _report(self) -> stage_pb2.Report:
        first = self._first_output_at or self._last_output_at
        return stage_pb2.Report(
            kind=self._environment.description.kind,
            replica=self._environment.address,
            queued=duration(self._timing.queued_s),
            first_output=duration(first - self._opened_at),
            total=duration(self._last_output_at - self._opened_at),
            input_items=self._inputs.items,
            output_items=self._items,
            cached_tokens=self._timing.cached_tokens,
            failovers=self._link.failovers if self._link is not None else 0,
        )

    async def _receive(self) -> stage_pb2.RunRequest | None:
        """The caller's next message, None after its half-close. Raises PROTOCOL for bytes that are no message, TooLarge."""
        data = await self._context.read()
        if data is grpc.aio.EOF:  # type: ignore[comparison-overlap]
            return None
        try:
            return await decoded(data, stage_pb2.RunRequest)
        except DecodeError:
            raise protocol_error("these bytes are no RunRequest") from None

    async def _discard(self) -> None:
        """Read up to the half-close; what comes before it does not matter any more."""
        while True:
            try:
                if await self._receive() is None:
                    return
            except (StageError, TooLarge):
                continue

    async def _await_half_close(self) -> None:
        """Wait for the caller's half-close: a stream that the server finishes first loses what the caller still writes, and its status."""
        if self._reader is not None:
            await asyncio.wait({self._reader})
        if self._reader is None or self._reader.exception() is not None:
            await self._discard()


def _superseded() -> StageError:
    return StageError("SUPERSEDED", "the session was opened again; this end of it was given up")


def _look_at_error(task: asyncio.Task[Any]) -> None:
    """An error that does not matter any more; asyncio complains of one that nobody looked at."""
    if not task.cancelled():
        task.exception()


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait for their end; their errors were looked at already or do not matter any more."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        _look_at_error(task)
