"""Makes the client of one command, for a router or for a private stack of this call."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from rich.markup import escape

from omnistage.cli.layout import Layout
from omnistage.cli.notices import Notices
from omnistage.cli.targets import check_target
from omnistage.cli.where import Where
from omnistage.client.async_omni import AsyncOmni
from omnistage.client.connection import CONNECT_TIMEOUT_S, Connection, Found


@asynccontextmanager
async def connect_client(target: Where, timeout_s: float, verbose: bool, *, is_quiet: bool = False) -> AsyncIterator[AsyncOmni]:
    """Yield a client. A private stack is started before the block and stopped at its end. timeout_s: the most seconds to wait for a
    connection. is_quiet: do not print what a call waits for."""
    async with AsyncExitStack() as exits:
        if isinstance(target.at, Layout):
            from omnistage.cli.starting import start_stack  # Imported here: a command that asks a router does without.

            stack = await exits.enter_async_context(start_stack(target.at, None, verbose))
            router = Found(stack.address, is_named=True, is_own=True)
        else:
            router = target.at
            await check_target(router.address)
        notices = Notices()

        def tell(message: str) -> None:
            if notices.is_terminal and not is_quiet:
                notices.tell(f"[dim]{escape(message)}[/]")

        limit_s = min(timeout_s, CONNECT_TIMEOUT_S)
        connection = Connection(router, limit_s, warn=_warn, tell=tell)
        yield await exits.enter_async_context(AsyncOmni.over(connection, target.api_key))


def _warn(message: str) -> None:
    Notices().tell(f"[yellow]warning:[/] {escape(message)}")
