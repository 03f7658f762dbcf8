"""A stage server: a process that serves one model of one kind as StageService.

Its guard refuses calls that do not show the token of the stack. Only calls of health and reflection need no token, up to a number of open
calls. A stage without a token is open, and then it listens on loopback addresses only. Every call becomes a stream, as in wire/calls.py."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import structlog
from grpc_health.v1.health import SERVICE_NAME as HEALTH_NAME

from omnistage.connector.arena import Arena
from omnistage.connector.liveness import sweep
from omnistage.connector.shm import READERS
from omnistage.host import process
from omnistage.host.addresses import check_can_listen, host_and_port, is_loopback
from omnistage.host.background import LastingTasks
from omnistage.host.errors import StartError
from omnistage.host.grpc_server import serve
from omnistage.host.process import tracing
from omnistage.host.spans import Tracer
from omnistage.host.token import read_token
from omnistage.host.watchdog import Watched
from omnistage.link.liveness import Channels
from omnistage.stage.logic import StageLogic
from omnistage.stage.servicer import StageServicer
from omnistage.stage.session import SessionEnvironment
from omnistage.stage.settings import AllowList, StageSettings
from omnistage.stage.telemetry import StageMetrics
from omnistage.v1 import stage_pb2
from omnistage.wire.calls import as_stream, leave_nothing, write
from omnistage.wire.channel import Credentials
from omnistage.wire.errors import StageError, abort
from omnistage.wire.limits import HOP_ROOM_BYTES
from omnistage.wire.token import KEY, VARIABLE, Token

log = structlog.get_logger(__name__)

OPEN_TO_ALL = (HEALTH_NAME, "grpc.reflection.v1alpha.ServerReflection", "grpc.reflection.v1.ServerReflection")
"""Services that need no token; every other service needs it, channelz too."""

RUN = f"/{stage_pb2.DESCRIPTOR.services_by_name['StageService'].full_name}/Run"

REFUSAL_LIMIT_S = 2.0
"""Seconds for the half-close of a refused caller, which holds only its stream meanwhile."""

MAX_TOKENLESS = 256
"""Largest number of open calls of one method without the token. Each method has its own count, so that watchers of the health take no room
from callers that check it. Sessions, and callers that show the token, are not counted."""

REQUEST_LIMIT_S = 2.0
"""Seconds for the request of a call without the token, if the call has exactly one request."""

TRUSTED_REQUEST_LIMIT_S = 30.0
"""Seconds for the request of a call with the token."""

if TYPE_CHECKING:  # At run time gRPC's classes take no type arguments.
    Context = grpc.aio.ServicerContext[bytes, bytes]
    Handler = grpc.RpcMethodHandler[Any, Any]


def refusal(shown: bool) -> StageError:
    """The error of a call without the right token. shown: whether the call had a token, but a wrong one."""
    fault = "the token of this call is not that of this stage" if shown else f"this stage takes calls with a token only (metadata {KEY})"
    return StageError("UNAUTHENTICATED", f"{fault}: all servers of a stack need the same {VARIABLE} or {VARIABLE}_FILE")


class Guard(grpc.aio.ServerInterceptor):
    """An interceptor that sees every call before its service does, and refuses calls without the right token. token: None: every caller is
    accepted."""

    def __init__(self, token: Token | None) -> None:
        self._token = token
        self._tokenless: Counter[str] = Counter()
        """Open calls without the token, by method."""

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]], details: grpc.HandlerCallDetails
    ) -> Handler | None:
        """The handler of a call: the service's own, or one that refuses the call; None if the server has no such method."""
        tokens = [value for key, value in details.invocation_metadata or () if key == KEY]
        if self._token is None or (len(tokens) == 1 and self._token.matches(tokens[0])):
            handler = await continuation(details)
            return None if handler is None else as_stream(handler, lambda _: nullcontext(), TRUSTED_REQUEST_LIMIT_S)
        service = details.method.removeprefix("/").partition("/")[0]
        if service in OPEN_TO_ALL:
            handler = await continuation(details)
            return None if handler is None else self._limit_calls(details.method, handler)
        return self._refusing(details.method, refusal(bool(tokens)))

    def _limit_calls(self, method: str, handler: Handler) -> Handler:
        """The handler, limited to MAX_TOKENLESS calls at once. method: its full name."""

        @contextmanager
        def place(context: Context) -> Iterator[None]:
            if self._tokenless[method] >= MAX_TOKENLESS:
                raise StageError("OVERLOADED", f"{MAX_TOKENLESS} calls of {method} without a token are open at this stage")
            with self._one_more(method):
                yield

        return as_stream(handler, place, REQUEST_LIMIT_S)

    def _refusing(self, method: str, error: StageError) -> Handler:
        """A handler that ends a call with `error`, without using its messages. It serves every kind of call as a stream, because a stream
        begins without a message. A call of Run gets Ended before the status, because for a link a stream without Ended is a loss."""

        async def refuse(requests: object, context: Context) -> None:
            if method == RUN:
                await write(context, stage_pb2.RunResponse(ended=error.to_ended()).SerializeToString())
                if self._tokenless[RUN] < MAX_TOKENLESS:
                    with self._one_more(RUN):
                        await _half_close(context)
            await abort(context, error)

        return grpc.stream_stream_rpc_method_handler(leave_nothing(refuse))

    @contextmanager
    def _one_more(self, method: str) -> Iterator[None]:
        """Count a call of the method as open while the block runs."""
        self._tokenless[method] += 1
        try:
            yield
        finally:
            self._tokenless[method] -= 1


async def _half_close(context: Context) -> None:
    """Wait for the caller's half-close, at most for REFUSAL_LIMIT_S."""
    try:
        async with asyncio.timeout(REFUSAL_LIMIT_S):
            while await context.read() is not grpc.aio.EOF:  # type: ignore[comparison-overlap]
                pass
    except TimeoutError:
        log.debug("guard.no_half_close")


def check_open(address: str) -> None:
    """Raises StartError, with what to do, if a stage without a token may not listen at HOST:PORT: it may at a loopback address only."""
    if not is_loopback(host_and_port(address)[0]):
        raise StartError(
            f"{address} can be reached from other hosts, and without a token whoever reaches it may use this stage: set {VARIABLE} or "
            f"{VARIABLE}_FILE, the same for all servers of the stack, or listen on 127.0.0.1"
        )


SWEEP_PERIOD_S = 60.0

EVERYWHERE = frozenset({"0.0.0.0", "[::]"})

LoadLogic = Callable[[StageSettings], StageLogic]
"""Load a model and wrap it for its kind. Runs in a thread, before the server listens."""


class StageServer:
    """The service of a stage process (host.process.Service)."""

    name = stage_pb2.DESCRIPTOR.services_by_name["StageService"].full_name
    max_calls: int | None = None

    def __init__(
        self,
        settings: StageSettings,
        logic: StageLogic,
        metrics: StageMetrics,
        credentials: Credentials,
        token: Token | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """token: the token that callers must show and that next hops are shown; None: every caller is accepted. tracer: see
        SessionEnvironment."""
        self.interceptors: Sequence[grpc.aio.ServerInterceptor] = (Guard(token),)
        self._is_open = token is None
        self._settings = settings
        self._logic = logic
        self.max_request_bytes = settings.max_message_bytes + HOP_ROOM_BYTES
        self._channels = Channels(credentials, self.max_request_bytes, token)
        description = stage_pb2.DescribeResponse()
        description.CopyFrom(logic.description)
        if settings.max_sessions:
            description.max_sessions = settings.max_sessions
        sweep()
        self._arena = Arena.create(max_bytes=None if settings.arena_bytes < 0 else settings.arena_bytes)
        self._environment = SessionEnvironment(
            logic,
            description,
            self._channels,
            AllowList(settings.allow),
            self._arena,
            inline_limit=settings.inline_limit,
            replay_limit=settings.replay_limit,
            session_limit_s=settings.session_limit,
            trusted_uids=settings.trusted_uids,
            on_post=metrics.count_tensor,
            tracer=tracer,
            on_made=metrics.count_items,
        )
        self._servicer = StageServicer(self._environment, metrics)
        self._broken = False
        self.lasting = LastingTasks()

    def register(self, server: grpc.aio.Server) -> None:
        self._servicer.register(server)

    def bound(self, address: str) -> None:
        """Note the address. A replica that listens on all addresses reports the name of its host instead, which differs between
        containers."""
        host, _, port = address.rpartition(":")
        self._environment.address = f"{socket.gethostname()}:{port}" if host in EVERYWHERE else address
        if self._is_open:
            log.info("stage.open", address=address, why=f"no {VARIABLE}: every process of this host may call this stage")

    async def start(self) -> None:
        await self._logic.warm_up()
        self._environment.description.settings.update(self._logic.description.settings)
        self.lasting.repeat("tidy", SWEEP_PERIOD_S, partial(tidy, self._arena))
        self._servicer.begin()

    async def drain(self, grace_s: float) -> None:
        await self._servicer.drain(grace_s)

    @property
    def threads(self) -> Sequence[Watched]:
        return self._logic.threads

    def fail(self) -> None:
        self._broken = True
        self._servicer.fail()

    async def close(self) -> None:
        await self.lasting.close()
        if not self._broken:  # Closing would wait for a thread that hangs.
            await self._logic.close()
        await self._channels.close()
        if self._arena is not None:
            self._arena.close()


async def tidy(arena: Arena | None) -> None:
    """Remove the shared memory of killed stages, in a thread, because a mount may hold thousands of files. Then unmap what this process has
    mapped of those files: memory that an idle reader has mapped is not free even if its file is gone. At last take back the blocks of
    `arena` whose readers are dead."""
    await asyncio.to_thread(sweep)
    READERS.drop_gone()
    if arena is not None:
        arena.settle()


async def serve_stage(kind: str, settings: StageSettings, credentials: Credentials, load: LoadLogic, refusal: type[Exception]) -> None:
    """Load the model and serve it until the process is to end. refusal: exception of `load` for faults that a user can mend. Raises
    StartError."""
    token = read_token(settings.token_file, os.environ)
    if token is None:
        check_open(settings.address)
    # Checked before the model is loaded, so that a port which is in use is noticed at once: loading takes long.
    check_can_listen(settings.address, "--address", is_reserved=settings.kept_port)
    check_can_listen(settings.metrics_address, "--metrics-address")
    async with tracing(settings.otlp, f"omnistage-{kind}") as tracer:
        try:
            logic = await asyncio.to_thread(load, settings)
        except refusal as error:
            raise StartError(str(error)) from None
        model = logic.description.model
        log.info("model.loaded", kind=kind, model=model, revision=logic.description.revision, **logic.description.settings)
        metrics = StageMetrics(kind, model)
        service = StageServer(settings, logic, metrics, credentials, token, tracer)
        await serve(settings, credentials, service, metrics.registry, {"kind": kind, "model": model})


def main(kind: str, load: LoadLogic, refusal: type[Exception]) -> int:
    """`python -m omnistage.<kind>`. Returns the exit code."""
    return process.main(
        f"omnistage.{kind}", StageSettings, lambda settings, credentials: serve_stage(kind, settings, credentials, load, refusal)
    )
