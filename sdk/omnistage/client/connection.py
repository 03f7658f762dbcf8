"""The connection of one client, or of several that share it: to a named router, to a running one that was found, or to a private stack;
and what the router lists, its pipelines and stage servers, as plain Python.

A caller may name no router: then one that a variable names is asked, or one where `omnistage serve` listens. Any user of this machine can
take a port, so a stranger may listen there. The router is asked only if the kernel says that all who listen there are of the same user as
this process, or of root."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import grpc

from omnistage.client import threads
from omnistage.client.errors import (
    BadRequestError,
    ClosedError,
    DeadlineError,
    OmniError,
    OverloadedError,
    RouterLostError,
    ServerError,
    StageLostError,
    StartingError,
    UnavailableError,
    WrongLoopError,
)
from omnistage.client.limits import Limit
from omnistage.client.private_stack import PrivateStack, StackPlan
from omnistage.client.reader import read_record, stage_name, state_name
from omnistage.client.routers import INSECURE, ApiKey, ClientCredentials, Router, Routers, split_addresses, warn
from omnistage.client.wording import did_you_mean, logger
from omnistage.v1 import omni_pb2

log = logger(__name__)

CONNECT_TIMEOUT_S = 5.0

START_PATIENCE_S = 30.0
"""Seconds that a call waits for a pipeline that is starting, unless this client started it."""


def tell(message: str) -> None:
    """Log a sentence that says what a call waits for."""
    log.info("%s", message)


class Connection:
    """A connection to a router: opened by the first call, on one event loop, and closed once."""

    def __init__(
        self,
        target: Found | StackPlan,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        *,
        start_patience_s: float = START_PATIENCE_S,
        credentials: ClientCredentials = INSECURE,
        warn: Callable[[str], None] = warn,
        tell: Callable[[str], None] = tell,
    ) -> None:
        """target: a router, or the plan of a stack to start. If the plan has only defaults and a router runs, that router is asked instead.
        start_patience_s: seconds that a call waits for a pipeline that is starting, unless this client started it. warn: as in `Routers`.
        tell: called with a sentence that says what a call waits for. Raises BadRequestError for a text that is no address."""
        self._plan = target if isinstance(target, StackPlan) else StackPlan()
        self._stack = PrivateStack(self._plan)
        self._known_router = None if isinstance(target, StackPlan) else target
        self._may_start = self._known_router is None  # whether the stack is started unless a running router is found
        self._may_find = self._may_start and self._plan.says_nothing
        """Whether to look for a running router before the stack is started; False once that was done."""
        self._credentials, self._warn = credentials, warn
        self._routers = None if self._known_router is None else self._routers_at(self._known_router)
        self._starting = asyncio.Lock()  # held during `start`
        self._loop: asyncio.AbstractEventLoop | None = None  # the one that opened the channels
        self._is_closed = False
        self._waits: set[asyncio.Timeout] = set()  # one for each block in `waiting`; `disconnect` lets them end
        self.connect_timeout_s = connect_timeout_s
        self.start_patience_s = start_patience_s
        self.tell = tell

    @property
    def address(self) -> str:
        """HOST:PORT of the router in use; empty until a private stack has started."""
        return "" if self._routers is None else self._routers.address

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def whereabouts(self) -> str:
        """A text for people: the address, whether the stack is private, and whether it can be used."""
        kind = ", private stack" if self.is_private else ""
        return f"{self.address or 'not started'}{kind}, {'closed' if self._is_closed else 'open'}"

    @property
    def is_private(self) -> bool:
        """Whether the router belongs to a stack that this connection started."""
        return self._known_router is None

    @property
    def places(self) -> int | None:
        """How many answers the private stack can give at the same time; None: no setting says it."""
        return self._plan.settings.get("max_sessions") if self.is_private else None

    @property
    def start_limit_s(self) -> float:
        """The most seconds that `start` and a first connection take together."""
        return self.connect_timeout_s + (self._stack.start_limit_s if self._may_start else 0.0)

    async def start(self, key: ApiKey | None) -> Routers:
        """Find the router, or start the private stack, within the time limit in its settings. Returns the routers to ask. key: the caller's
        key, sent when a running router is looked for. Raises ClosedError and StackError."""
        threads.check_fork()
        self._stay_on_loop()
        async with self._starting:
            self._check_open()
            if self._may_find:
                self._known_router, self._may_find = await find_router(key, self._credentials), False
                if self._known_router is not None:
                    self._routers = self._routers_at(self._known_router)
                    log.info("asking the router at %s, which runs already", self._known_router.address)
            if self._routers is None:
                self._routers = Routers(await self._stack.start_on_thread(), credentials=self._credentials, warn=self._warn)
            return self._routers

    async def connect(self, timeout_s: float, key: ApiKey | None) -> Router:
        """The first router that can be connected. key: of the caller. timeout_s: for connecting, without the start of a stack. Raises the
        errors of `start` and `Routers.connect`."""
        routers = await self.start(key)
        return await routers.connect(timeout_s, key)

    def note_loss(self, address: str) -> None:
        """Note that the router at this address was lost: from now on the next one is connected, if there are several."""
        if self._routers is not None:
            self._routers.note_loss(address)

    async def begin(self, pipeline: str, limit: Limit) -> None:
        """Have the private stack start one of its pipelines, and wait until it serves. Raises StackError if it cannot start, and
        DeadlineError when the limit passes; the start then goes on."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit.left_s), self.waiting():
                await self._stack.begin_on_loop(pipeline)
                return
        raise limit.passed(f"{pipeline} was still starting, and goes on with it")

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """A context for a wait that uses no channel: closing this connection ends the wait with ClosedError, as it ends calls."""
        threads.check_fork()
        self._stay_on_loop()
        self._check_open()
        try:
            async with asyncio.timeout(None) as wait:
                self._waits.add(wait)
                try:
                    yield
                finally:
                    self._waits.discard(wait)
        except TimeoutError:
            if wait.expired():
                raise ClosedError("the client was closed while it answered") from None
            raise

    async def pause(self, seconds: float) -> None:
        """Wait. Raises ClosedError if the connection is closed meanwhile."""
        async with self.waiting():
            await asyncio.sleep(seconds)

    def advise(self, error: OmniError, request: omni_pb2.GenerateRequest) -> None:
        """Give an error a hint that fits the router and the request, as `advise` does."""
        advise(self._known_router, error, request)

    async def disconnect(self) -> None:
        """The first half of closing: cancel all calls and waits, and close the channels."""
        if self._loop is not None and self._loop.is_closed():
            self._is_closed = True  # with the loop all calls and waits on it have ended
            return
        self._stay_on_loop()
        self._is_closed = True
        waits, self._waits = self._waits, set()
        for wait in waits:
            wait.reschedule(0.0)
        self._stack.give_up()
        async with self._starting:
            if self._routers is not None:
                await self._routers.close()

    def stop_stack(self) -> None:
        """The second half of closing: end the private stack. Blocks; needs no event loop, so that it also works while Python shuts down."""
        self._stack.stop()

    def _routers_at(self, router: Found) -> Routers:
        """The routers at the address of `router`. A router that no person named must belong to this user or to root."""
        return Routers(router.address, None if router.is_named else is_router_ours, credentials=self._credentials, warn=self._warn)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("this client is closed")

    def _stay_on_loop(self) -> None:
        """Raises WrongLoopError on another event loop than the one that opened the channels."""
        running = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = running
        if self._loop is not running:
            raise WrongLoopError("this AsyncOmni was first used on another event loop")


ROUTER_VARIABLE = "OMNISTAGE_ROUTER"
"""HOST:PORT of a router, or several with commas between; `SEARCH_OFF`: none, even if one runs."""

SEARCH_OFF = "none"

LOCAL_ADDRESS = "127.0.0.1:50050"
"""Where `omnistage serve` listens by default."""

PIPELINES_OPENING = "this router has "
"""Words in the router's refusal of an unknown pipeline; the names of its pipelines follow them."""

LACK_FIELDS = ("model", "thinker", "diffusion")
DRAWING_LACK_FIELDS = (*LACK_FIELDS, "outputs")
"""The fields that a router names in its refusal when it has no pipeline for the request; DRAWING_LACK_FIELDS: for a drawing."""

CHECKPOINTS = {
    "video": "Wan 2.2",
    "sound": "Stable Audio Open",
    **dict.fromkeys(("image", "drawing"), "Qwen-Image"),
    "edit": "Qwen-Image-Edit",
    **dict.fromkeys(("speech", "answer", "sees", "hears", "watches"), "Qwen2.5-Omni"),
}
"""A published checkpoint for everything that a router may lack, by the name that its refusal has for it in the metadata `lack`."""

LENGTHS = {"video": "{frames}, {steps}", "audio": "{seconds}, {steps}"}
"""The options that make a drawing smaller, by its output port."""

ON_PRIVATE_STACK: Mapping[type[OmniError], str] = {
    UnavailableError: "Its processes may have been ended from outside: {anew}.",
    OverloadedError: "Ask again after the stated delay, or give it more places: {more_places}.",
    StartingError: "It starts: ask again in a while.",
    StageLostError: "Ask again: what was lost is started again.",
    RouterLostError: "Ask again: the same seed gives the same answer.",
    ServerError: "To see the cause: {output}.",
}
"""Hints for errors of a private stack: the user does not know its address, and it may have ended by now."""

PATIENCE_S = 2.0
"""Seconds to wait for a router that listens but does not answer at once: it may be busy."""

_TABLES = {"/proc/net/tcp": ("0100007F", "00000000"), "/proc/net/tcp6": ("0000000000000000FFFF00000100007F", "0" * 32)}
"""Tables of the kernel, and in the spelling of each the addresses at which a connection to 127.0.0.1 may end: proc_net_tcp.txt."""

_LISTEN, _ESTABLISHED = "0A", "01"
"""States of a socket in these tables."""


@dataclass(frozen=True, slots=True)
class Found:
    """A router that a person named, or that was found on this machine. address: HOST:PORT, or several with commas between. is_named: a
    person named it, and it may not run. pipelines: its pipelines; empty if a person named it and nobody asked it for them. is_own: the
    caller started it for this use, and it ends with the caller."""

    address: str
    is_named: bool
    pipelines: tuple[Pipeline, ...] = ()
    is_own: bool = False

    def has(self, pipeline: str) -> bool:
        """Whether the router is known to serve a pipeline of this name or to be starting it."""
        return bool(Pipeline.find_called(pipeline, self.pipelines))

    def advice(self, missing: str = "") -> str:
        """A hint how to get a pipeline which the router lacks. The person who started the router must do it: nobody else knows the sources
        and settings of its pipelines. missing: name of the pipeline; empty: any pipeline that can do the request."""
        names = ", ".join(one.name for one in self.pipelines)
        dots = f"where the dots are what {names} was started with"
        if not missing:
            own_stack = "{own_stack} gives a stack of your own for it, DIR being the folder of a checkpoint"
            return f"{own_stack}. To add it to this router, start that again as `omnistage serve ... DIR`, {dots}."
        return (
            f"`omnistage stop {self.address}` ends it; start it again with {missing} added: `omnistage serve ... {missing}`, {dots}."
            f" {ROUTER_VARIABLE}={SEARCH_OFF} gives a stack of your own instead."
        )


def advise(router: Found | None, error: OmniError, request: omni_pb2.GenerateRequest) -> None:
    """Give an error a hint that fits the router and the request: if the time limit passed, if the router lacks a pipeline or has several
    that could answer, or if the stack is private, because other commands cannot find it. router: None: a private stack. request: the
    request."""
    if isinstance(error, DeadlineError):
        error.hint = f"{error.advice.removesuffix('.')}, or ask for less: {_size_advice(request)}."
    elif (router is None or router.is_own) and type(error) in ON_PRIVATE_STACK:
        error.hint = ON_PRIVATE_STACK[type(error)]
    if lack := error.metadata.get("lack", ""):
        error.say_more(serve_advice(lack))
    is_unknown = error.reason == "UNKNOWN_MODEL"
    lacking_fields = DRAWING_LACK_FIELDS if request.HasField("diffusion") else LACK_FIELDS
    if candidates := error.metadata.get("candidates", ""):
        names = candidates.split(",")
        error.hint = f"Name one of {', '.join(names)}: {{pipeline={names[0]}}}."
    elif is_unknown or error.metadata.get("field") in lacking_fields:
        names = re.split(r", | \(|\)", error.message.partition(PIPELINES_OPENING)[2])  # NAME, or NAME (FURTHER NAME).
        if is_unknown and (guess := did_you_mean(request.model, filter(None, names))):
            error.say_more(guess.removeprefix("; "))
        # Without a hint the refusal itself names the pipelines that exist, or those that can do it.
        is_addable = router is not None and router.pipelines and not router.has(request.model)
        error.hint = router.advice(request.model) if router is not None and is_addable else ""


def serve_advice(lack: str) -> str:
    """Advice on the checkpoint that does what a router lacks. lack: a key of CHECKPOINTS; others are of newer routers."""
    return f"serve a checkpoint that does, such as {CHECKPOINTS[lack]}" if lack in CHECKPOINTS else "serve a checkpoint that does"


def _size_advice(request: omni_pb2.GenerateRequest) -> str:
    """Advice how to make the request smaller, in words, with `{NAME}` in place of an option's name."""
    if request.HasField("diffusion"):
        return next((options for port, options in LENGTHS.items() if port in request.outputs), "{steps}")
    return "a shorter text" if request.thinker.verbatim else "{max_tokens}"


def named_router() -> Found | None:
    """The router that the variable names. None: the variable is empty, or turns the search off. Raises BadRequestError for a text that is
    no address."""
    name = os.environ.get(ROUTER_VARIABLE, "").strip()
    if not name or is_search_off():
        return None
    try:
        split_addresses(name)
    except BadRequestError as error:
        raise BadRequestError.of(ROUTER_VARIABLE, f"{error.fields[0].description}, or {SEARCH_OFF} for no router") from None
    return Found(name, is_named=True)


def is_search_off() -> bool:
    """Whether the variable is `SEARCH_OFF`, so that no router is looked for."""
    return os.environ.get(ROUTER_VARIABLE, "").strip().lower() == SEARCH_OFF


async def find_router(key: ApiKey | None = None, credentials: ClientCredentials = INSECURE, *, must_list: bool = False) -> Found | None:
    """The router that the variable names, whether it runs or not; else the router of this machine, if it can be trusted and answers; else
    None. key: of the caller, sent only to a trusted router. credentials: the same as for the later connection. must_list: ask the named
    router for its pipelines too; it has none if it does not answer."""
    if is_search_off():
        return None
    if (configured := named_router()) is not None:
        pipelines = await _list(Routers(configured.address, credentials=credentials), key) if must_list else ()
        return replace(configured, pipelines=pipelines)
    address = LOCAL_ADDRESS
    if not await asyncio.to_thread(is_router_ours, address):  # On a thread, because the table of a busy host is long.
        return None
    pipelines = await _list(Routers(address, is_router_ours, credentials=credentials), key)
    return Found(address, is_named=False, pipelines=pipelines) if pipelines else None


async def _list(routers: Routers, key: ApiKey | None) -> tuple[Pipeline, ...]:
    """The pipelines of a router; none if it does not answer soon. Closes the routers."""
    try:
        router = await routers.connect(PATIENCE_S, key)
        response = await router.stub.ListModels(omni_pb2.ListModelsRequest(), timeout=PATIENCE_S, metadata=router.metadata)
    except (UnavailableError, grpc.aio.AioRpcError):  # The process that listens hangs, or is no router.
        return ()
    finally:
        await routers.close()
    return tuple(Pipeline.all_of(response))


def is_router_ours(address: str) -> bool:
    """Whether a process listens at this address of 127.0.0.1, and all processes that listen or hold a connection there are of this user
    or of root: a process that listened before may have accepted our connection. False also if the kernel's tables cannot be read."""
    sockets = list(_sockets(address))
    return any(listens for _, listens in sockets) and {user for user, _ in sockets} <= {os.geteuid(), 0}


def is_address_taken(address: str) -> bool:
    """Whether a process listens there."""
    return any(listens for _, listens in _sockets(address))


def _sockets(address: str) -> Iterator[tuple[int, bool]]:
    """Yields (uid of its user, whether it listens) for every socket that listens at this address or has accepted a connection to it."""
    port = int(address.rpartition(":")[2])
    for table, addresses in _TABLES.items():
        with suppress(OSError):  # The machine has no IPv6, or another kind of kernel.
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()  # Field 1 is the local address, 3 the state, 7 the user.
                host, _, local_port = fields[1].rpartition(":")
                if fields[3] in (_LISTEN, _ESTABLISHED) and int(local_port, 16) == port and host in addresses:
                    yield int(fields[7]), fields[3] == _LISTEN


PipelineState = Literal["ready", "starting", "unloaded"]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline of a router. stages, inputs, outputs: names. on_request: outputs that come only if a call names them. state: ready;
    starting: it cannot answer yet, or not now, because one of its stages is away; unloaded: nobody asked it for long, and the next call
    waits until it is loaded. names: further names by which calls may name it, those of its checkpoint. unsure_outputs: of outputs and
    on_request, those that it may turn out not to give: its checkpoint is not loaded yet."""

    name: str
    stages: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    voices: tuple[str, ...]
    description: str
    on_request: tuple[str, ...] = ()
    state: PipelineState = "ready"
    names: tuple[str, ...] = ()
    unsure_outputs: tuple[str, ...] = ()

    @property
    def draws(self) -> bool:
        """Whether `draw`, `film` or `sound` may ask it: it has a diffusion stage."""
        return "diffusion" in self.stages

    @property
    def only_draws(self) -> bool:
        """Whether it has a diffusion stage and no Thinker, so that it cannot be asked for text."""
        return self.draws and "thinker" not in self.stages

    @staticmethod
    def find_called(name: str, pipelines: Iterable[Pipeline]) -> list[Pipeline]:
        """The pipelines that a router means by a name, in any case: the one whose own name it is, else all that have it as a further
        name."""
        key, candidates = name.casefold(), list(pipelines)
        exact = [one for one in candidates if one.name == key]
        return exact or [one for one in candidates if key in map(str.casefold, one.names)]

    @property
    def label(self) -> str:
        """Its name for people, with the best known one of its further names."""
        return f"{self.name} ({self.names[0]})" if self.names else self.name

    @classmethod
    def all_of(cls, listed: omni_pb2.ListModelsResponse) -> list[Pipeline]:
        """A router's pipelines, the ready ones first."""
        models: list[tuple[omni_pb2.Model, PipelineState]]
        models = [(model, "ready") for model in listed.models]
        models += [(model, "unloaded" if model.unloaded else "starting") for model in listed.starting]
        return [read_record(cls, model, stages=tuple(map(stage_name, model.stages)), state=state) for model, state in models]


@dataclass(frozen=True, slots=True)
class Replica:
    """One stage server. state: serving; draining: it ends; lost; starting: it has not answered yet, or is being started again; unloaded, as
    its pipeline. sessions, queue: how many sessions run,
    and how many wait. transport: the ways by which tensors reach it, the most used first; empty before its first session. settings: by
    name, the values that it chose, each with the reason: device, dtype, sizes of batch and cache."""

    pipeline: str
    stage: str
    model: str
    address: str
    pid: int
    state: str
    sessions: int
    queue: int
    transport: str
    settings: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, replica: omni_pb2.Replica) -> Replica:
        transports = sorted(replica.load.transports.items(), key=lambda item: (-item[1], item[0]))
        transport = ",".join(name.removeprefix("TRANSPORT_KIND_").lower() for name, _ in transports)
        load = {"sessions": replica.load.sessions, "queue": replica.load.queued, "transport": transport}
        return read_record(cls, replica, stage=stage_name(replica.kind), state=state_name(replica.state), **load)
