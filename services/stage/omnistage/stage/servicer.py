"""StageService: Describe, Watch and Run over one StageLogic."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress

import grpc
import grpc.aio
import structlog

from omnistage.connector.shm import boot_id
from omnistage.models.options import with_resumed
from omnistage.stage.caller import Caller, Context
from omnistage.stage.opening import check_open
from omnistage.stage.session import Session, SessionEnvironment
from omnistage.stage.telemetry import SessionTrace, StageMetrics
from omnistage.v1 import stage_pb2, stage_pb2_grpc, tensor_pb2
from omnistage.wire.calls import forget_traceback
from omnistage.wire.errors import CallerGone, StageError
from omnistage.wire.proto_values import duration

log = structlog.get_logger(__name__)

WATCH_PERIOD_S = 1.0
WATCH_MIN_INTERVAL_S = 0.1


class StageServicer(stage_pb2_grpc.StageServiceServicer):
    """Serves one model. Holds the state that all sessions share; Session holds everything of one session."""

    def __init__(self, environment: SessionEnvironment, metrics: StageMetrics) -> None:
        self._environment = environment
        self._metrics = metrics
        self._sessions = 0
        self._running: dict[str, Session] = {}
        self._transports: Counter[str] = Counter()
        self._streams = 0
        self._ready = False
        self._draining = False
        self._broken = False
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._complete_description()
        # The metrics read the load at each scrape.
        metrics.watch(environment.description, environment.logic.load, lambda: self._sessions, environment.arena)

    def register(self, server: grpc.aio.Server) -> None:
        """Add this service to a server. Run gets its requests as bytes: wire/limits.py makes messages of them in bounded time."""
        stage_pb2_grpc.add_StageServiceServicer_to_server(self, server)
        run: grpc.RpcMethodHandler[bytes, stage_pb2.RunResponse] = grpc.stream_stream_rpc_method_handler(
            self.Run, None, stage_pb2.RunResponse.SerializeToString
        )
        service = stage_pb2.DESCRIPTOR.services_by_name["StageService"].full_name
        server.add_registered_method_handlers(service, {"Run": run})  # It replaces the generated one.

    def _complete_description(self) -> None:
        """Add what the process knows: its host's boot id, its pid, and its transports."""
        description = self._environment.description
        description.boot_id = boot_id()
        description.pid = os.getpid()
        if self._environment.arena is not None:
            description.transports.append(tensor_pb2.TRANSPORT_KIND_SHARED_MEMORY)
        description.transports.append(tensor_pb2.TRANSPORT_KIND_INLINE)

    # Unary and watching ------------------------------------------------------------------------------------------------------------

    async def Describe(
        self, request: stage_pb2.DescribeRequest, context: grpc.aio.ServicerContext[stage_pb2.DescribeRequest, stage_pb2.DescribeResponse]
    ) -> stage_pb2.DescribeResponse:
        return self._environment.description

    async def Watch(
        self, request: stage_pb2.WatchRequest, context: grpc.aio.ServicerContext[stage_pb2.WatchRequest, stage_pb2.WatchResponse]
    ) -> AsyncIterator[stage_pb2.WatchResponse]:
        """A report at once, on every change of the sessions, and once in every period; never more than ten a second."""
        asked_s = request.period.ToTimedelta().total_seconds() if request.HasField("period") else WATCH_PERIOD_S
        period_s = min(max(asked_s, WATCH_MIN_INTERVAL_S), WATCH_PERIOD_S)
        while True:
            changed = self._changed  # Taken before the report, so that no change after the report is missed.
            report = self._report()
            report.period.CopyFrom(duration(period_s))
            yield report
            await asyncio.sleep(WATCH_MIN_INTERVAL_S)
            if period_s > WATCH_MIN_INTERVAL_S:
                with suppress(TimeoutError):
                    async with asyncio.timeout(period_s - WATCH_MIN_INTERVAL_S):
                        await changed.wait()

    def _report(self) -> stage_pb2.WatchResponse:
        """The load and the state of this stage now."""
        load = self._environment.logic.load()
        arena = self._environment.arena
        report = stage_pb2.WatchResponse(
            sessions=self._sessions,
            queued=load.queued,
            draining=self._draining or not self._ready,
            kv_pages_used=load.kv_pages_used,
            kv_pages_total=load.kv_pages_total,
            transports={name: count for name, count in self._transports.items() if count},
        )
        if arena is not None:
            arena.settle()
            report.arena_bytes_used, report.arena_bytes_total, report.leases = arena.bytes_used, arena.bytes_total, arena.leases
        return report

    # Running -----------------------------------------------------------------------------------------------------------------------

    async def Run(  # type: ignore[override]  # A coroutine that writes, which grpc.aio takes as well as a generator.
        self, request_iterator: object, context: Context
    ) -> None:
        """Serve one session, from its Open to the closing handshake. Metrics, log and trace get its end, whatever it is."""
        structlog.contextvars.clear_contextvars()
        begin_s = time.monotonic()
        caller = Caller(context, self._environment.session_limit_s)
        trace = SessionTrace(self._environment.tracer.begin(self._environment.kind, caller.forwarded))
        if trace.span.trace_id:
            structlog.contextvars.bind_contextvars(trace_id=trace.span.trace_id)
        session: Session | None = None
        reason = "CANCELLED"
        self._count_stream(1)
        try:
            session = await self._opened(caller, trace)
            await self._run(session, caller)
            await caller.end(None)
            reason = "OK"
        except StageError as error:
            reason = error.reason or "INTERNAL"
            log.info("session.ended", **error.for_log())
            forget_traceback(error)
            if self._broken:
                await caller.break_off("this replica is broken")  # It raises: no Ended is sent.
            await caller.end(error)
        finally:
            caller.close()
            self._count_stream(-1)
            self._metrics.count_session(reason)
            if session is not None:
                session.close()
                self._metrics.add_timing(session.meter.timing)
                if session.meter.first_output_s is not None:
                    self._metrics.first_output.observe(session.meter.first_output_s)
            self._metrics.duration.observe(time.monotonic() - begin_s)
            trace.end(reason, session)

    async def _opened(self, caller: Caller, trace: SessionTrace) -> Session:
        """The session that the caller asks for, not begun yet. Raises StageError if its Open is wrong or does not come."""
        request = await caller.receive_open()
        structlog.contextvars.bind_contextvars(session_id=request.session_id[:64])
        opening = await check_open(request, self._environment.description, self._environment.allow_list)
        return Session(self._environment, caller, opening, trace)

    async def _run(self, session: Session, caller: Caller) -> None:
        """Run a session to its end. Raises the error with which it ends: only here does an unforeseen error become INTERNAL."""
        self._supersede_older_than(session)
        self._admit(session)
        session_id = session.opening.request.session_id
        self._running[session_id] = session
        self._count_session(1)
        self._transports[session.transport] += 1
        try:
            await session.run(await session.prepare())
        except (StageError, CallerGone):
            raise
        except Exception as error:
            log.exception("session.bug")
            raise StageError("", f"internal error of the {self._environment.kind}: {type(error).__name__}") from None
        finally:
            self._transports[session.transport] -= 1
            self._count_session(-1)
            if self._running.get(session_id) is session:
                del self._running[session_id]

    def _supersede_older_than(self, session: Session) -> None:
        """End a session that runs here with the same id and an older Open: its caller was given up, but may be a stopped process that will
        wake. Raises SUPERSEDED if this Open is the older of the two, because then it is from such a process."""
        running = self._running.get(session.opening.request.session_id)
        if running is None:
            return
        if session.opening.attempts < running.opening.attempts:
            raise StageError("SUPERSEDED", "the session goes on elsewhere; this caller was given up")
        if session.opening.attempts > running.opening.attempts:
            running.supersede()

    def _admit(self, session: Session) -> None:
        """Raise DRAINING or OVERLOADED if a session may not begin. A session that began elsewhere may exceed the limit: see
        `with_resumed`."""
        if self._draining or not self._ready:
            raise StageError("DRAINING", "this replica takes no sessions now; ask another")
        limit = self._environment.description.max_sessions
        allowed_sessions = with_resumed(limit) if session.opening.resumption.is_resumed else limit
        if self._sessions >= allowed_sessions:
            raise StageError("OVERLOADED", f"all {limit} sessions are taken")

    def _count_session(self, change: int) -> None:
        self._sessions += change
        self._notify()

    def _count_stream(self, change: int) -> None:
        """Count one open stream more or less. change: 1 or -1. A stream ends after its session, because the closing handshake comes last. A
        drain waits for the streams, so that a slow reader gets the end of its answer."""
        self._streams += change
        if self._streams:
            self._idle.clear()
        else:
            self._idle.set()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # Ready and draining ------------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Accept sessions from now on: the model is warm."""
        self._ready = True
        self._notify()

    def fail(self) -> None:
        """Note that the process is broken: refuse new sessions. Running sessions that fail from now on break off, so that their callers see
        a loss."""
        self._broken = self._draining = True
        self._notify()

    async def drain(self, grace_s: float) -> None:
        """Refuse new sessions with DRAINING and wait for the running ones, at most `grace_s`."""
        self._draining = True
        self._notify()
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            log.warning("drain.cut", sessions=self._sessions)
