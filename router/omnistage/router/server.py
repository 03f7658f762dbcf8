"""The router as a service of a process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence

import grpc.aio
import structlog

from omnistage.host.background import LastingTasks, first_of
from omnistage.host.errors import StartError
from omnistage.host.grpc_server import serve
from omnistage.host.process import tracing
from omnistage.host.spans import Tracer
from omnistage.host.token import read_token
from omnistage.host.watchdog import Watched
from omnistage.link.liveness import Channels
from omnistage.router.admission import Admission, Gate
from omnistage.router.callers import Callers
from omnistage.router.front import SERVICE, Front, ServedPipeline
from omnistage.router.loading import Loading
from omnistage.router.pipeline import PipelineError, PipelineFile, load_pipeline, split_name
from omnistage.router.placement import Placement, capacity
from omnistage.router.settings import RouterSettings
from omnistage.router.telemetry import RouterMetrics
from omnistage.wire.channel import Credentials
from omnistage.wire.limits import HOP_ROOM_BYTES, MAX_CALLS, TEXT_REQUEST_BYTES
from omnistage.wire.token import Token

log = structlog.get_logger(__name__)


class RouterServer:
    """The service of a router process (host.process.Service). It watches the replicas, and is ready when one pipeline fits its stages."""

    name = SERVICE
    max_calls: int | None = MAX_CALLS

    def __init__(
        self,
        settings: RouterSettings,
        pipelines: Mapping[str, PipelineFile],
        metrics: RouterMetrics,
        credentials: Credentials,
        token: Token | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """pipelines: as their files describe them, by name. token: shown to the stages; the gateway of this stack shows one that follows
        from it. tracer: see Front."""
        takes_media = any(set(pipeline.could_take) - {"text"} for pipeline in pipelines.values())
        self.max_request_bytes = settings.max_message_bytes if takes_media else min(TEXT_REQUEST_BYTES, settings.max_message_bytes)
        self._channels = Channels(credentials, settings.max_message_bytes + HOP_ROOM_BYTES, token)
        self._pipelines = pipelines
        self._metrics = metrics
        self._served = {
            name: ServedPipeline(
                pipeline, Placement(self._channels, _addresses(pipeline, settings), lone_patience_s=settings.lone_patience)
            )
            for name, pipeline in pipelines.items()
        }
        placements = {name: served.placement for name, served in self._served.items()}
        self._loading = Loading(placements, dict(settings.idle_unload))
        places = settings.max_sessions
        self._admission = Admission(lambda: places or capacity(self._ready_placements()), settings.client_share)
        callers = Callers(token and token.for_gateway())
        self._front = Front(
            self._served,
            self._channels,
            self._admission,
            metrics,
            self._loading,
            stall_limit_s=settings.stall_limit,
            session_limit_s=settings.session_limit,
            callers=callers,
            tracer=tracer,
        )
        self.interceptors: Sequence[grpc.aio.ServerInterceptor] = (Gate(callers),)
        self.lasting = LastingTasks()
        self._launcher_fd = settings.launcher_fd

    def register(self, server: grpc.aio.Server) -> None:
        self._front.register(server)

    def bound(self, address: str) -> None:
        log.info("router.bound", address=address)

    async def start(self) -> None:
        """Wait until the first pipeline is served, or all are unloaded; others follow on their own. Raises StartError if a pipeline does
        not fit its stages while none is served."""
        await self._loading.listen(self._launcher_fd)
        first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for name, served in self._served.items():
            self._metrics.watch(name, dict.fromkeys(served.pipeline.kinds, ""), served.placement.count)
            self.lasting.start(f"watch {name}", self._watch(served, first))
        await first_of(first, self._loading.rests())

    async def _watch(self, served: ServedPipeline, first: asyncio.Future[None]) -> None:
        """Watch the replicas of a pipeline, and serve it when they fit. first: set when the first pipeline is served."""

        def misfits(reason: str) -> None:
            log.error("pipeline.misfit", pipeline=served.pipeline.name, why=reason)
            if not first.done():
                first.set_exception(StartError(reason))

        async with asyncio.TaskGroup() as group:
            group.create_task(served.placement.watch())
            await served.get_ready(misfits)
            name = served.pipeline.name
            models = {kind: described.model for kind, described in served.descriptions.items()}
            self._metrics.watch(name, models, served.placement.count)
            self._metrics.begin(name, served.descriptions)
            log.info("pipeline.ready", pipeline=name)
            self._loading.rest(name)
            if not first.done():
                first.set_result(None)

    def _ready_placements(self) -> list[Placement]:
        return [served.placement for served in self._served.values() if served.is_ready]

    async def drain(self, grace_s: float) -> None:
        self._admission.drain()
        try:
            async with asyncio.timeout(grace_s):
                await self._admission.idle()
        except TimeoutError:
            log.warning("drain.cut", answers=self._admission.running)

    @property
    def threads(self) -> Sequence[Watched]:
        return ()

    def fail(self) -> None:
        self._admission.drain()

    async def close(self) -> None:
        self._loading.close()
        await self.lasting.close()
        await self._channels.close()


def _addresses(pipeline: PipelineFile, settings: RouterSettings) -> dict[str, list[str]]:
    """The addresses of a pipeline's replicas, by kind of stage: from the command line, else from the file. Raises StartError for a stage
    without an address."""
    addresses: dict[str, list[str]] = {}
    for stage in pipeline.stages:
        typed_addresses = [address for name, address in settings.stages if name in (stage.kind, f"{pipeline.name}/{stage.kind}")]
        addresses[stage.kind] = typed_addresses or list(stage.addresses)
        if not addresses[stage.kind]:
            raise StartError(f"no address for the {stage.kind} of {pipeline.name}; give --stages {stage.kind}=HOST:PORT")
    return addresses


def _load(settings: RouterSettings) -> dict[str, PipelineFile]:
    """The pipelines of the settings, by name. Raises StartError."""
    pipelines = dict[str, PipelineFile]()
    try:
        for text in settings.pipeline:
            name, source = split_name(text)
            pipeline = load_pipeline(source)
            name = name or pipeline.name
            if name in pipelines:
                raise StartError(f"there are two pipelines {name}; give one another name, --pipeline NAME={source}")
            pipelines[name] = pipeline.model_copy(update={"name": name}).with_names(settings.names.get(name, ()))
    except PipelineError as error:
        raise StartError(str(error)) from None
    if unknown := sorted(settings.names.keys() - pipelines):
        raise StartError(f"--names: there is no pipeline {unknown[0]}; there are {', '.join(pipelines)}")
    return pipelines


async def _wait_to_start(fd: int) -> None:
    """Wait until the other end of the pipe `fd` is closed; return at once if `fd` is negative.

    A program that starts a whole stack starts the router together with the stages, so that it has imported its modules when they listen.
    If the router looked for them earlier, it would find them late: gRPC waits up to a second between two attempts to connect."""
    if fd < 0:
        return
    started = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(fd, started.set)
    try:
        await started.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)


async def serve_router(settings: RouterSettings, credentials: Credentials) -> None:
    """Serve the pipelines until the process is to end. Raises StartError."""
    await _wait_to_start(settings.start_fd)
    pipelines = _load(settings)
    token = read_token(settings.token_file, os.environ)
    metrics = RouterMetrics()
    async with tracing(settings.otlp, "omnistage-router") as tracer:
        service = RouterServer(settings, pipelines, metrics, credentials, token, tracer)
        await serve(settings, credentials, service, metrics.registry, {"kind": "router", "model": ",".join(pipelines)})
