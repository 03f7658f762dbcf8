"""A stage server: a process that serves one model of one kind as StageService."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from functools import partial

import grpc.aio
import structlog

from omnistage.connector.arena import Arena
from omnistage.connector.shm import READERS
from omnistage.connector.sweep import sweep
from omnistage.host import program
from omnistage.host.addresses import check_can_listen
from omnistage.host.errors import StartError
from omnistage.host.grpc_server import serve
from omnistage.host.lasting import LastingTasks
from omnistage.host.spans import Tracer
from omnistage.host.token import read_token
from omnistage.host.tracing import tracing
from omnistage.host.watchdog import Watched
from omnistage.link.channels import Channels
from omnistage.stage.allowlist import AllowList
from omnistage.stage.environment import SessionEnvironment
from omnistage.stage.guard import Guard, check_open, say_open
from omnistage.stage.logic import StageLogic
from omnistage.stage.metrics import StageMetrics
from omnistage.stage.servicer import StageServicer
from omnistage.stage.settings import StageSettings
from omnistage.v1 import stage_pb2
from omnistage.wire.credentials import Credentials
from omnistage.wire.limits import HOP_ROOM_BYTES
from omnistage.wire.token import Token

log = structlog.get_logger(__name__)

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
            on_post=metrics.sent,
            tracer=tracer,
            on_made=metrics.made,
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
            say_open(address)

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
    """Remove the shared memory of killed stages, in a thread, because a mount may hold thousands of files. Then unmap the part that this
    process has mapped: memory that an idle reader has mapped is not free even if its file is gone."""
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
    return program.main(
        f"omnistage.{kind}", StageSettings, lambda settings, credentials: serve_stage(kind, settings, credentials, load, refusal)
    )
