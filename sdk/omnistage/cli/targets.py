"""Which router a command means: the one it names, the one that runs, or one that is started for the call."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.markup import escape

from omnistage.cli import interrupt
from omnistage.cli.layout import Layout
from omnistage.cli.notices import Notices
from omnistage.client import found
from omnistage.client.address import is_unknown, split
from omnistage.client.errors import BadRequestError, UnavailableError
from omnistage.client.found import OFF, VARIABLE, find_router, is_off, named_router
from omnistage.client.listing import Pipeline
from omnistage.host.addresses import host_and_port

LOOKUP_S = 2.0
"""How long a name may take to be found, and after that it is left to the connection."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a router must be able to do for a call. inputs, outputs: such as image and audio. kind: of a stage that it must have."""

    inputs: Sequence[str]
    outputs: Sequence[str]
    kind: str

    def is_met_by(self, pipelines: Sequence[Pipeline]) -> bool:
        """Whether one of them does all of it."""
        return any(self._is_met(pipeline) for pipeline in pipelines)

    def _is_met(self, pipeline: Pipeline) -> bool:
        gives = {*pipeline.outputs, *pipeline.on_request}
        return self.kind in pipeline.stages and {*self.inputs} <= {*pipeline.inputs} and {*self.outputs} <= gives


def target_for(
    need: Need, address: str | None, pipeline: str, *, devices: Mapping[str, str] | None = None, is_quiet: bool = False
) -> str | Layout:
    """HOST:PORT of the router to ask, or the stack to start for this call. address: one that was typed. pipeline: one that was typed, which
    is started where no router was; so is whatever has settings. devices: likewise. is_quiet: do not tell which it is.

    Raises an OmniError where neither can be."""
    if address is not None:
        return address
    notices = Notices()
    told = not is_quiet and notices.is_terminal
    if not pipeline and not devices and (router := asyncio.run(find_router())) is not None:
        if router.is_named or need.is_met_by(router.pipelines):
            if told:
                notices.say(f"[dim]asking the router at {escape(router.address)}{f' ({VARIABLE})' if router.is_named else ''}[/]")
            return router.address
        if told:
            notices.say(f"[dim]the router at {escape(router.address)} cannot do this; starting a stack for this call[/]")
    elif told:
        what = f" of {escape(pipeline)}" if pipeline else ""
        advice = "" if pipeline or devices else "; `omnistage serve --detach` keeps one"
        notices.say(f"[dim]starting a stack{what} for this call{advice}[/]")
    # An interrupt in the middle of an import ends in a traceback, and there is nothing to clean up yet.
    interrupt.exit_at_once()
    from omnistage.cli.pipelines import layout_for

    interrupt.raise_interrupts()
    kind = need.kind if need.kind == "diffusion" else ""
    return layout_for(pipeline, need.inputs, need.outputs, kind=kind, devices=devices)


async def check_target(address: str) -> None:
    """Raises BadRequestError for what is no address of a router, and for several none of whose hosts is known. address: as `--address`."""
    try:
        addresses = split(address)
    except BadRequestError as error:
        raise BadRequestError.of("--address", error.fields[0].description) from None
    if all([await _is_unknown(one) for one in addresses]):
        hosts = ", ".join(repr(host_and_port(one)[0]) for one in addresses)
        raise BadRequestError.of("--address", f"no host {hosts} is known here")


def running() -> str | None:
    """The router that a command means which starts nothing: named by the variable, or somebody of this user listens where `omnistage serve`
    does."""
    if is_off():
        return None
    if (named := named_router()) is not None:
        return named.address
    return found.LOCAL_ADDRESS if found.is_ours(found.LOCAL_ADDRESS) else None


def must_run() -> str:
    """The same. Raises UnavailableError."""
    if (address := running()) is not None:
        return address
    where = found.LOCAL_ADDRESS
    if is_off():
        raise UnavailableError(f"{VARIABLE}={OFF}: no router is looked for", hint="Name one: --address HOST:PORT.")
    if found.is_taken(where):
        hint = f"If you trust it, name it: --address {where}"
        raise UnavailableError(f"who listens at {where} is another user of this machine", hint=hint)
    hint = f"Start it with `omnistage serve`, or name a router: --address HOST:PORT, or {VARIABLE}."
    raise UnavailableError(f"nothing serves at {where}", hint=hint)


async def _is_unknown(address: str) -> bool:
    """A look-up that takes too long says nothing."""
    try:
        async with asyncio.timeout(LOOKUP_S):
            return await is_unknown(address)
    except TimeoutError:
        return False
