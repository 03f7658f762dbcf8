"""A client for one command: of the router at an address, or of a private stack for this call."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from omnistage.cli.layout import Layout
from omnistage.cli.starting import started
from omnistage.cli.targets import check_target
from omnistage.client.async_omni import CONNECT_TIMEOUT_S, AsyncOmni


@asynccontextmanager
async def connected(target: str | Layout, timeout_s: float, verbose: bool) -> AsyncIterator[AsyncOmni]:
    """target: HOST:PORT of a router, or what to start for this call. timeout_s: how long to wait for a connection, at most."""
    async with AsyncExitStack() as exits:
        if isinstance(target, Layout):
            stack = await exits.enter_async_context(started(target, None, verbose))
            target = stack.address
        else:
            await check_target(target)
        yield await exits.enter_async_context(AsyncOmni(address=target, connect_timeout_s=min(timeout_s, CONNECT_TIMEOUT_S)))
