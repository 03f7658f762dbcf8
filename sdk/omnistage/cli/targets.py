"""Chooses the router of a command, the one that was typed, the one that runs, or one that is started for the call, and connects a client
to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.markup import escape

from omnistage.cli import interrupt
from omnistage.cli.console import Notices
from omnistage.cli.stack.layout import Layout, reachable_address
from omnistage.client import connection
from omnistage.client.async_omni import AsyncOmni
from omnistage.client.connection import Connection, Found
from omnistage.client.errors import BadRequestError, UnavailableError, UnknownModelError
from omnistage.client.options import Options
from omnistage.client.routers import LOOKUP_S, ApiKey, is_unknown, key_of, split_addresses
from omnistage.client.wording import did_you_mean
from omnistage.host.addresses import host_and_port


@dataclass(frozen=True, slots=True)
class Where:
    """The router to ask, with key and pipeline. at: a router, or the stack to start for this call. api_key: None: there is no key.
    pipeline: the name to put into each request; empty: the router chooses."""

    at: Found | Layout
    api_key: ApiKey | None = None
    pipeline: str = ""

    @property
    def address(self) -> str:
        """HOST:PORT of the router; empty until one is started."""
        return self.at.address if isinstance(self.at, Found) else ""

    def options(self, options: Options) -> Options:
        """The options of a request, with the pipeline added."""
        return Options(**options, pipeline=self.pipeline) if self.pipeline else options


def typed_key(key_text: str | None) -> ApiKey | None:
    """The key that was typed by `--api-key`, else the one in the variable for it; None if there is neither. Raises BadRequestError."""
    return key_of(key_text, "--api-key")


def where_of(address: str, api_key: str | None, pipeline: str = "") -> Where:
    """The router that `--address` names. Raises BadRequestError for a text that is no key."""
    return Where(Found(address, is_named=True), typed_key(api_key), pipeline=pipeline)


@dataclass(frozen=True, slots=True)
class Need:
    """The abilities that a stack started for a call needs. inputs, outputs: such as image and audio. kind: of its first stage; empty:
    any."""

    inputs: Sequence[str]
    outputs: Sequence[str]
    kind: str


def target_for(
    need: Need,
    address: str | None,
    pipeline: str,
    api_key: str | None = None,
    *,
    devices: Mapping[str, str] | None = None,
    is_quiet: bool = False,
) -> Where:
    """Returns the router to ask, or the stack to start for this call. A stack is started if no router runs, or if the user typed devices, a
    checkpoint or the file of a pipeline. address, pipeline, api_key, devices: as typed. is_quiet: print no line about the choice.

    Raises an OmniError if there can be neither.
    """
    if address is not None:
        return where_of(address, api_key, pipeline)
    key = typed_key(api_key)
    notices = Notices()
    is_shown = not is_quiet and notices.is_terminal
    can_start = _can_start(pipeline)
    may_be_served = not devices and not _is_file(pipeline)
    router = asyncio.run(connection.find_router(key, must_list=can_start)) if may_be_served else None
    if router is not None and can_start and not router.has(pipeline):
        router = None
    if router is not None:
        if pipeline and not router.is_named and not router.has(pipeline):
            served = ", ".join(one.label for one in router.pipelines)
            names = [name for one in router.pipelines for name in (one.name, *one.names)]
            message = f"the router at {router.address} serves {served}, not {pipeline}{did_you_mean(pipeline, names)}"
            raise UnknownModelError(message, hint=router.advice(pipeline) if _is_shipped(pipeline) else UnknownModelError.ADVICE)
        if is_shown:
            variable = f" ({connection.ROUTER_VARIABLE})" if router.is_named else ""
            notices.tell(f"[dim]asking the router at {escape(router.address)}{variable}[/]")
        return Where(router, key, pipeline=pipeline)
    # Here an interrupt just ends the process: in the middle of an import it would give a traceback, and there is nothing to clean up yet.
    interrupt.exit_at_once()
    from omnistage.cli.stack.pipelines import check_named, layout_for

    interrupt.raise_interrupts()
    if pipeline:
        check_named(pipeline)
    if is_shown:
        pipeline_text = f" of {escape(pipeline)}" if pipeline else ""
        advice = "" if pipeline or devices else "; `omnistage serve --detach` keeps one"
        notices.tell(f"[dim]starting a stack{pipeline_text} for this call{advice}[/]")
    return Where(layout_for(pipeline, need.inputs, need.outputs, kind=need.kind, devices=devices), key)


def _is_file(pipeline: str) -> bool:
    """Whether a text means a path or a file, or names what is to be started; then no router can know a pipeline by it."""
    return pipeline.startswith(("/", ".", "~")) or pipeline.endswith((".yaml", ".yml")) or "=" in pipeline


def _can_start(pipeline: str) -> bool:
    """Whether a text may be a DIR or OWNER/NAME, which is started unless a router serves a pipeline of this name. As in `serve`, a text
    that is the name of a shipped pipeline and of a folder means the pipeline."""
    return "/" in pipeline or (pipeline != "" and Path(pipeline).is_dir() and not _is_shipped(pipeline))


def _is_shipped(pipeline: str) -> bool:
    """Whether the pipeline comes with omnistage."""
    from omnistage.router.pipeline import shipped_pipelines

    return pipeline in shipped_pipelines()


async def check_target(address: str) -> None:
    """Raises BadRequestError for a text that is no address of a router, for the page of a stack, or if none of its hosts is known. address:
    as typed by `--address`, maybe several."""
    try:
        addresses = split_addresses(address)
    except BadRequestError as error:
        raise BadRequestError.of("--address", error.fields[0].description) from None
    from omnistage.cli.stack.served import served_here

    pages = {reachable_address(served.http): served.address for served in served_here() if served.http}
    if all(one in pages for one in addresses):
        routers = ",".join(pages[one] for one in addresses)
        raise BadRequestError.of("--address", f"the page of a stack is at {address}, over HTTP; its router is at {routers}")
    if all([await _is_unknown(one) for one in addresses]):
        hosts = ", ".join(repr(host_and_port(one)[0]) for one in addresses)
        raise BadRequestError.of("--address", f"no host {hosts} is known here")


def running() -> Found | None:
    """The router for a command that starts nothing: the one that the variable names, else one of this user where `omnistage serve` listens
    by default; None if there is neither, or if the variable turns the search off."""
    if connection.is_search_off():
        return None
    if (router := connection.named_router()) is not None:
        return router
    return Found(connection.LOCAL_ADDRESS, is_named=False) if connection.is_router_ours(connection.LOCAL_ADDRESS) else None


def must_run(address: str | None = None, api_key: str | None = None) -> Where:
    """The router that was typed, or the one that runs. Raises UnavailableError if there is none."""
    if address is not None:
        return where_of(address, api_key)
    if (router := running()) is not None:
        return Where(router, typed_key(api_key))
    local_address = connection.LOCAL_ADDRESS
    others = _elsewhere()
    if connection.is_search_off():
        setting, hint = f"{connection.ROUTER_VARIABLE}={connection.SEARCH_OFF}", f"Name one: --address HOST:PORT. {others}".rstrip()
        raise UnavailableError(f"{setting}: no router is looked for", hint=hint)
    if connection.is_address_taken(local_address):
        hint = f"If you trust it, name it: --address {local_address}"
        raise UnavailableError(f"who listens at {local_address} is another user of this machine", hint=hint)
    hint = f"Start it with `omnistage serve`, or name a router: --address HOST:PORT, or {connection.ROUTER_VARIABLE}."
    raise UnavailableError(f"nothing serves at {local_address}", hint=f"{hint} {others}".rstrip())


def _elsewhere() -> str:
    """A hint with the addresses of this user's stacks; empty if none is known."""
    from omnistage.cli.stack.served import served_here

    addresses = [served.address for served in served_here()]
    return f"Stacks of yours serve elsewhere: --address {' or '.join(addresses)}." if addresses else ""


async def _is_unknown(address: str) -> bool:
    """Whether the host of an address is unknown. False if the look-up takes too long: then the connection will show it."""
    try:
        async with asyncio.timeout(LOOKUP_S):
            return await is_unknown(address)
    except TimeoutError:
        return False


@asynccontextmanager
async def connect_client(target: Where, timeout_s: float, verbose: bool, *, is_quiet: bool = False) -> AsyncIterator[AsyncOmni]:
    """Yield a client. A private stack is started before the block and stopped at its end. timeout_s: the most seconds to wait for a
    connection. is_quiet: do not print what a call waits for."""
    async with AsyncExitStack() as exits:
        if isinstance(target.at, Layout):
            from omnistage.cli.stack.ending import start_stack  # Imported here: a command that asks a router does without.

            stack = await exits.enter_async_context(start_stack(target.at, None, verbose))
            router = Found(stack.address, is_named=True, is_own=True)
        else:
            router = target.at
            await check_target(router.address)
        notices = Notices()

        def tell(message: str) -> None:
            if notices.is_terminal and not is_quiet:
                notices.tell(f"[dim]{escape(message)}[/]")

        limit_s = min(timeout_s, connection.CONNECT_TIMEOUT_S)
        client = AsyncOmni.over(Connection(router, limit_s, warn=_warn, tell=tell), target.api_key)
        yield await exits.enter_async_context(client)


def _warn(message: str) -> None:
    Notices().tell(f"[yellow]warning:[/] {escape(message)}")
