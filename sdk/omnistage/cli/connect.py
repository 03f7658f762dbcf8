"""A client for one command: of the router that it asks, or of a private stack for this call."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from rich.markup import escape

from omnistage.cli.layout import Layout
from omnistage.cli.notices import Notices
from omnistage.cli.starting import started
from omnistage.cli.targets import check_target
from omnistage.cli.where import Where
from omnistage.client.async_omni import AsyncOmni
from omnistage.client.connection import CONNECT_TIMEOUT_S, Connection
from omnistage.client.found import Found


@asynccontextmanager
async def connected(where: Where, timeout_s: float, verbose: bool) -> AsyncIterator[AsyncOmni]:
    """timeout_s: how long to wait for a connection, at most."""
    async with AsyncExitStack() as exits:
        if isinstance(where.at, Layout):
            stack = await exits.enter_async_context(started(where.at, None, verbose))
            router = Found(stack.address, is_named=True)
        else:
            router = where.at
            await check_target(router.address)
        connection = Connection(router, min(timeout_s, CONNECT_TIMEOUT_S), credentials=where.credentials, warn=_warn)
        yield await exits.enter_async_context(AsyncOmni.over(connection, where.api_key))


def _warn(message: str) -> None:
    Notices().say(f"[yellow]warning:[/] {escape(message)}")
