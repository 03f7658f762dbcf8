"""Which router a command means: the one it names, or the one that runs where `omnistage serve` puts it."""

from __future__ import annotations

import asyncio

from omnistage.cli.layout import DEFAULT_ADDRESS
from omnistage.client.address import is_unknown, split
from omnistage.client.errors import BadRequestError, UnavailableError
from omnistage.host.addresses import host_and_port

__all__ = ["DEFAULT_ADDRESS", "check_target", "must_run", "running"]

LOOK_S = 0.5
LOOKUP_S = 2.0
"""How long a name may take to be found, and after that it is left to the connection."""


async def check_target(address: str) -> None:
    """Raises BadRequestError for what is no address of a router, and for several none of whose hosts is known. address: as `--address`."""
    try:
        addresses = split(address)
    except BadRequestError as error:
        raise BadRequestError.of("--address", error.fields[0].description) from None
    if all([await _is_unknown(one) for one in addresses]):
        hosts = ", ".join(repr(host_and_port(one)[0]) for one in addresses)
        raise BadRequestError.of("--address", f"no host {hosts} is known here")


async def running() -> str | None:
    """The address where `omnistage serve` listens by default, if something does; told at once."""
    try:
        async with asyncio.timeout(LOOK_S):
            _, writer = await asyncio.open_connection(*host_and_port(DEFAULT_ADDRESS))
    except OSError:  # nobody listens; TimeoutError is one too
        return None
    writer.close()
    return DEFAULT_ADDRESS


async def must_run() -> str:
    """The same. Raises UnavailableError."""
    if (address := await running()) is None:
        hint = "Start it with `omnistage serve`, or name a router: --address HOST:PORT."
        raise UnavailableError(f"nothing serves at {DEFAULT_ADDRESS}", hint=hint)
    return address


async def _is_unknown(address: str) -> bool:
    """A look-up that takes too long says nothing."""
    try:
        async with asyncio.timeout(LOOKUP_S):
            return await is_unknown(address)
    except TimeoutError:
        return False
