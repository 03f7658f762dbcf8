"""Stage servers and routers for tests: as real processes, or in the test's own event loop."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence, Set
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc.aio
from prometheus_client import CollectorRegistry

from helpers.ports import NEIGHBOURS, take_address
from helpers.program import Program, start
from helpers.surroundings import usual_variables
from omnistage.code2wav.stage import Code2WavStage
from omnistage.diffusion.stage import DiffusionStage
from omnistage.host.grpc_server import GrpcService
from omnistage.host.settings import ServerSettings
from omnistage.models.options import LoadOptions
from omnistage.models.registry import FAMILIES, load
from omnistage.router.pipeline import PipelineFile, load_pipeline
from omnistage.router.server import RouterServer
from omnistage.router.settings import RouterSettings
from omnistage.router.telemetry import RouterMetrics
from omnistage.stage.logic import StageLogic
from omnistage.stage.model import ModelStage
from omnistage.stage.server import StageServer
from omnistage.stage.settings import StageSettings
from omnistage.stage.telemetry import StageMetrics
from omnistage.talker.stage import TalkerStage
from omnistage.thinker.stage import ThinkerStage
from omnistage.v1 import omni_pb2, omni_pb2_grpc, stage_pb2, stage_pb2_grpc
from omnistage.wire.channel import Credentials, client_options, server_options
from omnistage.wire.proto_values import kind_name
from omnistage.wire.token import Token

STARTS = ("omnistage.router", "omnistage.thinker", "omnistage.talker", "omnistage.code2wav", "omnistage.diffusion")
"""The servers that run as processes, which a fork server imports before."""
STAGES: Mapping[str, type[ModelStage[Any]]] = {
    kind_name(stage.kind): stage for stage in (ThinkerStage, TalkerStage, Code2WavStage, DiffusionStage)
}
KINDS = tuple(STAGES)
CREDENTIALS = Credentials()
"""The credentials of the test process for all that it serves and calls, unless a test has others."""
CHAIN = ("thinker", "talker", "code2wav")
READY_TIMEOUT_S = 100.0
LOOK_S = 0.05
"""Between two looks at a router's list; it has no stream of changes."""
STOP_TIMEOUT_S = 25.0
SETTLE_TIMEOUT_S = 25.0
"""These two are shorter than a grace of 30 s, which nobody is to wait for."""


class NotReady(RuntimeError):
    """The process ended, or said nothing in time, before it was ready. `exit_code` is None if it had to be killed."""

    def __init__(self, message: str, exit_code: int | None, log: str) -> None:
        super().__init__(f"{message}\n{log}")
        self.exit_code = exit_code
        self.log = log


def _loaders(flags: Sequence[str]) -> list[str]:
    """The modules that load the models of the family that is named, if it is one: they import torch and more."""
    names = {word for before, word in itertools.pairwise(flags) if before == "--family"} & FAMILIES.keys()
    return sorted({entry.loader.partition(":")[0] for name in names for entry in FAMILIES[name].models.values()})


class ServerProcess:
    """One server process, from its start to its end. Use it as a context manager; a failing test shows the end of its log."""

    def __init__(
        self, module: str, *flags: str, log_folder: Path, environment: Mapping[str, str] | None = None, starts: Sequence[str] = STARTS
    ) -> None:
        """Starts it; `wait_ready` waits until it is SERVING. starts: as in `helpers.program.start`."""
        self.module = module
        self._ready, ready = os.pipe()
        lifeline, self._lifeline = os.pipe()
        self.log_path = log_folder / f"{module.rpartition('.')[2]}-{time.monotonic_ns()}.log"
        variables = {**usual_variables(), **(environment or {})}
        with self.log_path.open("wb") as log, Path(os.devnull).open("rb") as nothing:
            words = [*flags, "--ready-fd", str(ready), "--lifeline-fd", str(lifeline), "--log-format", "json"]
            streams = (nothing.fileno(), log.fileno(), log.fileno())
            program = Program(module, words, variables, streams, (ready, lifeline), imports=_loaders(flags))
            self.process = start(program, starts)
        os.close(ready)
        os.close(lifeline)
        self._told = False
        self.address = ""
        self.metrics_address = ""
        self.kind = ""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def wait_ready(self) -> None:
        """Return when it is SERVING. Raises NotReady."""
        readable, _, _ = select.select([self._ready], [], [], READY_TIMEOUT_S)
        with os.fdopen(self._ready) as pipe:
            self._ready = -1
            line = pipe.readline() if readable else ""
        ready = json.loads(line or "{}")
        if "address" not in ready:
            exit_code = self.wait() if ready else self.stop()  # one that says why it cannot start is about to end
            raise NotReady(f"{self.module} did not get ready", exit_code, self.log())
        self.address, self.metrics_address, self.kind = ready["address"], ready["metrics_address"], ready["kind"]

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def cut_lifeline(self) -> None:
        """Close our end of the lifeline, as happens when the parent dies."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def terminate(self) -> None:
        """Ask it, once, to drain and end; returns at once."""
        if self.process.poll() is None and not self._told:
            self._told = True
            self.process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        """Its exit code. Raises subprocess.TimeoutExpired."""
        return self.process.wait(STOP_TIMEOUT_S)

    def stop(self) -> int:
        """End it, by force if it does not end by itself in time, and return its exit code."""
        self.terminate()
        try:
            return self.wait()
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
        finally:
            self.cut_lifeline()
            if self._ready >= 0:
                os.close(self._ready)
                self._ready = -1

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
        if error is not None:
            error.add_note(f"--- log of {self.module} ({self.pid}):\n{self.log()[-4000:]}")


@dataclass
class ServerProcesses:
    """Processes that belong together. stages: by kind. router: None where there is none."""

    stages: dict[str, ServerProcess] = field(default_factory=dict)
    router: ServerProcess | None = None

    @property
    def address(self) -> str:
        """Where clients call."""
        assert self.router is not None
        return self.router.address

    @property
    def addresses(self) -> dict[str, str]:
        return {kind: server.address for kind, server in self.stages.items()}

    def processes(self) -> list[ServerProcess]:
        return [*self.stages.values(), *([self.router] if self.router else [])]


def stage_flags(options: Mapping[str, object] | None = None, family: str = "toy") -> list[str]:
    """Flags of a stage process that may dial its neighbours."""
    return ["--family", family, "--options", json.dumps(dict(options or {})), "--allow", ",".join(NEIGHBOURS), "--grace", "5"]


@contextmanager
def stack(
    log_folder: Path,
    *,
    kinds: Sequence[str] = CHAIN,
    pipeline: str = "toy",
    family: str = "toy",
    options: Mapping[str, object] | None = None,
    options_of: Mapping[str, Mapping[str, object]] | None = None,
    stage_args: Sequence[str] = (),
    router_args: Sequence[str] | None = (),
) -> Iterator[ServerProcesses]:
    """Stage processes, started in parallel, and a router in front of them. options_of: further options of a kind. router_args: None for no
    router. Raises NotReady."""
    running = ServerProcesses()
    try:
        for kind in kinds:
            own = {**(options or {}), **(options_of or {}).get(kind, {})}
            flags = [*stage_flags(own, family), "--address", take_address(), *stage_args]
            running.stages[kind] = ServerProcess(f"omnistage.{kind}", *flags, log_folder=log_folder)
        for server in running.stages.values():
            server.wait_ready()
        if router_args is not None:
            stages = ",".join(f"{kind}={address}" for kind, address in running.addresses.items())
            running.router = ServerProcess(
                "omnistage.router", "--pipeline", pipeline, "--stages", stages, "--grace", "5", *router_args, log_folder=log_folder
            )
            running.router.wait_ready()
        yield running
    except BaseException as error:
        for server in running.processes():
            error.add_note(f"--- log of {server.module} ({server.pid}):\n{server.log()[-4000:]}")
        raise
    finally:
        for server in reversed(running.processes()):
            server.terminate()
        for server in running.processes():
            server.stop()


@contextmanager
def toy_address(folder: Path, pipeline: str, *router_args: str) -> Iterator[str]:
    """HOST:PORT of a router in front of the stages of a toy pipeline, as `omnistage serve` would start them. folder: of the logs. pipeline:
    a name or a file."""
    stages = {stage.kind: stage for stage in load_pipeline(pipeline).stages}
    (family,) = {stage.family for stage in stages.values()}
    options = {kind: stage.options for kind, stage in stages.items()}
    with stack(folder, kinds=[*stages], pipeline=pipeline, family=family, options_of=options, router_args=router_args) as running:
        yield running.address


@dataclass
class Local:
    address: str
    service: GrpcService
    registry: CollectorRegistry


def toy_logic(kind: str, options: Mapping[str, object] | None = None) -> StageLogic:
    return family_logic("toy", kind, options)


def family_logic(family: str, kind: str, options: Mapping[str, object] | None = None, checkpoint: Path | None = None) -> StageLogic:
    return STAGES[kind](load(family, kind, LoadOptions(checkpoint, family=dict(options or {}))))


@asynccontextmanager
async def local_stage(
    logic: StageLogic,
    *,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    credentials: Credentials = CREDENTIALS,
    token: Token | None = None,
    **settings: Any,
) -> AsyncIterator[Local]:
    """A stage server in this event loop. interceptors: see its calls first. token: what its callers must show.

    settings: fields of StageSettings; without arena and with all servers of tests as neighbours, unless they say so.
    """
    chosen = {"family": "toy", "arena_bytes": 0, "allow": NEIGHBOURS, **settings}
    kind = kind_name(logic.description.kind)
    metrics = StageMetrics(kind, logic.description.model)
    service = StageServer(StageSettings(**chosen), logic, metrics, credentials, token)
    seen_first = (*interceptors, *service.interceptors)
    async with _serving(service, metrics.registry, StageSettings(**chosen), credentials, seen_first) as local:
        yield local


def is_busy(local: Local) -> bool:
    """Whether a stage in this event loop has a session."""
    sessions = [metric for metric in local.registry.collect() if metric.name == "omnistage_stage_inflight"]
    return any(sample.value for metric in sessions for sample in metric.samples)


@asynccontextmanager
async def local_router(
    stages: Mapping[str, str] | Sequence[tuple[str, str]],
    pipeline: PipelineFile | None = None,
    *others: PipelineFile,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    credentials: Credentials = CREDENTIALS,
    token: Token | None = None,
    **settings: Any,
) -> AsyncIterator[Local]:
    """A router in this event loop. interceptors: as of `local_stage`. stages: kind, or PIPELINE/KIND, to address; pairs where a
    kind has more replicas, all of which it has found. settings: fields of RouterSettings."""
    chosen = RouterSettings(stages=tuple(stages.items() if isinstance(stages, Mapping) else stages), **settings)
    answering = pipeline or load_pipeline("toy")
    metrics = RouterMetrics()
    service = RouterServer(chosen, {one.name: one for one in (answering, *others)}, metrics, credentials, token)
    async with _serving(service, metrics.registry, chosen, credentials, (*interceptors, *service.interceptors)) as local:
        if not isinstance(stages, Mapping):
            async with omni_stub(local.address) as stub:
                await until_serving(stub, {address for _, address in stages})
        yield local


@asynccontextmanager
async def _serving(
    service: GrpcService,
    registry: CollectorRegistry,
    settings: ServerSettings,
    credentials: Credentials,
    interceptors: Sequence[grpc.aio.ServerInterceptor],
) -> AsyncIterator[Local]:
    options = server_options(settings.max_message_bytes, service.max_request_bytes)
    server = grpc.aio.server(interceptors=interceptors, options=options, maximum_concurrent_rpcs=service.max_calls)
    service.register(server)
    address = settings.address if "address" in settings.model_fields_set else take_address()
    assert credentials.listen(server, address), f"cannot listen on {address}"
    service.bound(address)
    await server.start()
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            await service.start()
        yield Local(address, service, registry)
    finally:
        await server.stop(0)
        await service.close()


@asynccontextmanager
async def local_chain(options: Mapping[str, object] | None = None, **settings: Any) -> AsyncIterator[dict[str, Local]]:
    async with (
        local_stage(toy_logic("thinker", options), **settings) as thinker,
        local_stage(toy_logic("talker", options), **settings) as talker,
        local_stage(toy_logic("code2wav", options), **settings) as code2wav,
    ):
        yield {"thinker": thinker, "talker": talker, "code2wav": code2wav}


# A port that one test gave back is soon the next test's; gRPC's shared connections would remember how the old server went away.
CLIENT_OPTIONS = [*client_options(), ("grpc.use_local_subchannel_pool", 1)]


@asynccontextmanager
async def stage_stub(address: str) -> AsyncIterator[stage_pb2_grpc.StageServiceAsyncStub]:
    async with CREDENTIALS.channel(address, CLIENT_OPTIONS) as channel:
        yield stage_pb2_grpc.StageServiceStub(channel)


@asynccontextmanager
async def omni_stub(address: str, credentials: Credentials = CREDENTIALS) -> AsyncIterator[omni_pb2_grpc.OmniServiceAsyncStub]:
    async with credentials.channel(address, CLIENT_OPTIONS) as channel:
        yield omni_pb2_grpc.OmniServiceStub(channel)


async def watch_until(address: str, condition: Callable[[stage_pb2.WatchResponse], bool]) -> stage_pb2.WatchResponse:
    """The first load report of a stage that meets the condition. Raises AssertionError with the last report after a bounded time."""
    last: stage_pb2.WatchResponse | None = None
    async with stage_stub(address) as stub:
        watch = stub.Watch(stage_pb2.WatchRequest(), timeout=SETTLE_TIMEOUT_S)
        with suppress(grpc.aio.AioRpcError):
            async for last in watch:
                if condition(last):
                    watch.cancel()
                    return last
    raise AssertionError(f"{address} did not get there; last report: {last}")


def is_free(report: stage_pb2.WatchResponse) -> bool:
    return not (report.sessions or report.queued or report.leases or report.kv_pages_used)


async def until_serving(
    stub: omni_pb2_grpc.OmniServiceAsyncStub, wanted: Set[object], name: Callable[[omni_pb2.Replica], object] = lambda one: one.address
) -> None:
    """Return when the router gives sessions to exactly these replicas, by their addresses or another name."""
    async with asyncio.timeout(READY_TIMEOUT_S):
        while True:
            listed = await stub.ListReplicas(omni_pb2.ListReplicasRequest(), timeout=5, wait_for_ready=True)
            if {name(replica) for replica in listed.replicas if replica.state == omni_pb2.REPLICA_STATE_SERVING} == wanted:
                return
            await asyncio.sleep(LOOK_S)


async def all_free(addresses: Sequence[str]) -> None:
    """Return when no stage holds anything of a session."""
    async with asyncio.TaskGroup() as group:
        for address in addresses:
            group.create_task(watch_until(address, is_free))
