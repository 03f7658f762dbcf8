"""A gateway of a test's own, as a process or in this one, and what asks it over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from helpers.servers import ServerProcess, ServerProcesses
from omnistage.gateway.accounts import GatewayMetrics
from omnistage.gateway.door import Door
from omnistage.gateway.port import HttpListener
from omnistage.gateway.server import new_app
from omnistage.gateway.settings import GatewaySettings
from omnistage.wire.token import Token

STARTS = ("omnistage.gateway",)


@contextmanager
def gateway(router: str, log_folder: Path, *flags: str) -> Iterator[ServerProcess]:
    """One in front of the router at this address; its own address is where HTTP is."""
    with ServerProcess("omnistage.gateway", "--router", router, *flags, log_folder=log_folder, starts=STARTS) as server:
        server.wait_ready()
        yield server


@asynccontextmanager
async def local_gateway(router: str, token: Token | None = None, **settings: Any) -> AsyncIterator[tuple[str, Door]]:
    """One in the event loop of the test, where its limits can be others; its URL. token: that it shows to the router."""
    given = GatewaySettings(address="127.0.0.1:0", router=router, **settings)
    door = Door(given, GatewayMetrics(), token)
    listener = HttpListener(given, new_app(door), door)
    address = listener.bind()
    await door.open()
    await listener.open()
    try:
        await listener.say(serves=True)
        yield f"http://{address}", door
    finally:
        await listener.close(is_broken=False)
        await door.close()


def router_of(stack: ServerProcesses) -> ServerProcess:
    assert stack.router is not None
    return stack.router
