"""Finds the running router for a caller who names none: one that a variable names, or one where `omnistage serve` listens.

Any user of this machine can take a port, so a stranger may listen there. The router is asked only if the kernel says that all who listen
there are of the same user as this process, or of root."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc

from omnistage.client.address import split
from omnistage.client.channel import INSECURE, ClientCredentials
from omnistage.client.errors import (
    BadRequestError,
    DeadlineError,
    OmniError,
    OverloadedError,
    RouterLostError,
    ServerError,
    StageLostError,
    StartingError,
    UnavailableError,
)
from omnistage.client.guesses import did_you_mean
from omnistage.client.key import ApiKey
from omnistage.client.listing import Pipeline
from omnistage.client.routers import Routers
from omnistage.v1 import omni_pb2

VARIABLE = "OMNISTAGE_ROUTER"
"""HOST:PORT of a router, or several with commas between; `OFF`: none, even if one runs."""

OFF = "none"

LOCAL_ADDRESS = "127.0.0.1:50050"
"""Where `omnistage serve` listens by default."""

THERE = "this router has "
"""Words in the router's refusal of an unknown pipeline; the names of its pipelines follow them."""

LACKING = ("model", "thinker", "diffusion")
LACKING_TO_DRAW = (*LACKING, "outputs")
"""The fields that a router names in its refusal when it has no pipeline for the request; LACKING_TO_DRAW: for a drawing."""

MAKERS = {"image": "draws pictures, such as Qwen-Image", "video": "makes films, such as Wan", "audio": "makes sound, such as Stable Audio"}
"""By the output port of a drawing: the checkpoints that can make such an output, in words."""

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
    person named it, and it may not run. pipelines: its pipelines; empty if a person named it. is_own: the caller started it for this use,
    and it ends with the caller."""

    address: str
    is_named: bool
    pipelines: tuple[Pipeline, ...] = ()
    is_own: bool = False

    def has(self, pipeline: str) -> bool:
        """Whether the router is known to serve this pipeline or to be starting it."""
        return any(one.name == pipeline for one in self.pipelines)

    def advice(self, missing: str = "") -> str:
        """A hint how to get a pipeline which the router lacks. The person who started the router must do it: nobody else knows the sources
        and settings of its pipelines. missing: name of the pipeline; empty: any pipeline that can do the request."""
        names = ", ".join(one.name for one in self.pipelines)
        added = missing or "PIPELINE"
        look = "" if missing else " `omnistage list` shows pipelines, and what they give."
        return (
            f"`omnistage stop {self.address}` ends it; start it again with {added} added: `omnistage serve ... {added}`, where the dots"
            f" are what {names} was started with.{look} {VARIABLE}={OFF} gives a stack of your own instead."
        )


def advise(router: Found | None, error: OmniError, request: omni_pb2.GenerateRequest) -> None:
    """Give an error a hint that fits the router and the request: if the time limit passed, if the router lacks a pipeline or has several
    that could answer, or if the stack is private, because other commands cannot find it. router: None: a private stack. request: the
    request."""
    if isinstance(error, DeadlineError):
        error.hint = f"{error.advice.removesuffix('.')}, or ask for less: {_less(request)}."
    elif (router is None or router.is_own) and type(error) in ON_PRIVATE_STACK:
        error.hint = ON_PRIVATE_STACK[type(error)]
    if candidates := error.metadata.get("candidates", ""):
        first, *_ = names = candidates.split(",")
        error.hint = f"Name one of {', '.join(names)}: {{pipeline={first}}}."
    elif error.reason == "UNKNOWN_MODEL" or error.metadata.get("field") in (LACKING_TO_DRAW if request.HasField("diffusion") else LACKING):
        if error.reason == "UNKNOWN_MODEL" and (guess := did_you_mean(request.model, error.message.partition(THERE)[2].split(", "))):
            error.say_more(guess.removeprefix("; "))
        lacks = router is not None and router.pipelines and not router.has(request.model)
        # No hint: the refusal itself names the pipelines that exist, or those that can do it.
        error.hint = router.advice(request.model) if router is not None and lacks else ""
        if router is None and request.HasField("diffusion") and (makes := MAKERS.get(",".join({*request.outputs} - {"progress"}))):
            error.hint = f"Serve a checkpoint that {makes}."


def _less(request: omni_pb2.GenerateRequest) -> str:
    """Advice how to make the request smaller, in words, with `{NAME}` in place of an option's name."""
    if request.HasField("diffusion"):
        return next((options for port, options in LENGTHS.items() if port in request.outputs), "{steps}")
    return "a shorter text" if request.thinker.verbatim else "{max_tokens}"


def named_router() -> Found | None:
    """The router that the variable names. None: the variable is empty, or turns the search off. Raises BadRequestError for a text that is
    no address."""
    name = os.environ.get(VARIABLE, "").strip()
    if not name or is_off():
        return None
    try:
        split(name)
    except BadRequestError as error:
        raise BadRequestError.of(VARIABLE, f"{error.fields[0].description}, or {OFF} for no router") from None
    return Found(name, is_named=True)


def is_off() -> bool:
    """Whether the variable is `OFF`, so that no router is looked for."""
    return os.environ.get(VARIABLE, "").strip().lower() == OFF


async def find_router(key: ApiKey | None = None, credentials: ClientCredentials = INSECURE) -> Found | None:
    """The router that the variable names, whether it runs or not; else the router of this machine, if it can be trusted and answers; else
    None. key: of the caller, sent only to a trusted router. credentials: the same as for the later connection."""
    if is_off():
        return None
    if (configured := named_router()) is not None:
        return configured
    address = LOCAL_ADDRESS
    if not await asyncio.to_thread(is_ours, address):  # On a thread, because the table of a busy host is long.
        return None
    routers = Routers(address, is_ours, credentials=credentials)
    try:
        router = await routers.connect(PATIENCE_S, key)
        response = await router.stub.ListModels(omni_pb2.ListModelsRequest(), timeout=PATIENCE_S, metadata=router.metadata)
    except (UnavailableError, grpc.aio.AioRpcError):  # The process that listens hangs, or is no router.
        return None
    finally:
        await routers.close()
    pipelines = tuple(Pipeline.all_of(response))
    return Found(address, is_named=False, pipelines=pipelines) if pipelines else None


def is_ours(address: str) -> bool:
    """Whether a process listens at this address of 127.0.0.1, and all processes that listen or hold a connection there are of this user
    or of root: a process that listened before may have accepted our connection. False also if the kernel's tables cannot be read."""
    sockets = list(_sockets(address))
    return any(listens for _, listens in sockets) and {user for user, _ in sockets} <= {os.geteuid(), 0}


def is_taken(address: str) -> bool:
    """Whether a process listens there."""
    return any(listens for _, listens in _sockets(address))


def _sockets(address: str) -> Iterator[tuple[int, bool]]:
    """Yields (uid of its user, whether it listens) for every socket that listens at this address or has accepted a connection to it."""
    port = int(address.rpartition(":")[2])
    for table, addresses in _TABLES.items():
        with suppress(OSError):  # The machine has no IPv6, or another kind of kernel.
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                host, _, local = fields[1].rpartition(":")
                if fields[3] in (_LISTEN, _ESTABLISHED) and int(local, 16) == port and host in addresses:
                    yield int(fields[7]), fields[3] == _LISTEN
