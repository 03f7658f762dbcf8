"""The gateway as a service of a process."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence

import structlog

from omnistage.gateway.app import new_app
from omnistage.gateway.door import Door
from omnistage.gateway.metrics import GatewayMetrics
from omnistage.gateway.port import HttpListener
from omnistage.gateway.settings import GatewaySettings
from omnistage.host import process
from omnistage.host.lasting import LastingTasks
from omnistage.host.program import Credentials
from omnistage.host.token import GATEWAY_VARIABLE, Token, read_token
from omnistage.host.watchdog import Watched

log = structlog.get_logger(__name__)


class GatewayServer:
    """The gateway as `process.serve` runs it. It serves as soon as it listens; /ready says whether the router serves too."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self.lasting = LastingTasks()

    def bound(self, address: str) -> None:
        log.info("gateway.bound", address=address, router=self._door.settings.router, keys="any")

    async def start(self) -> None:
        """Start to listen, and go on with films that an earlier process left."""
        await self._door.open()
        self.lasting.start("omnistage-films", self._door.jobs.tidy())

    @property
    def threads(self) -> Sequence[Watched]:
        return ()

    async def drain(self, grace_s: float) -> None:
        """Give running requests up to `grace_s` seconds to end, and cancel films that nobody reads."""
        try:
            async with asyncio.timeout(grace_s):
                await self._door.jobs.end_unwatched()
                await self._door.idle()
        except TimeoutError:
            log.warning("drain.cut", answers=self._door.running)

    def fail(self) -> None:
        """Does nothing, because the listener breaks off the running answers."""

    async def close(self) -> None:
        await self.lasting.close()
        await self._door.close()


def _token(settings: GatewaySettings) -> Token | None:
    """The token that the gateway shows to the router: its own, which follows from the stack's if that is given. Raises StartError."""
    of_stack = read_token(settings.token_file, os.environ)
    return of_stack.for_gateway() if of_stack else read_token(settings.gateway_token_file, os.environ, GATEWAY_VARIABLE)


async def serve_gateway(settings: GatewaySettings, credentials: Credentials) -> None:
    """Serve until a signal stops the process. credentials: for calls between servers; HTTP clients have none. Raises StartError."""
    # These loggers have a line for every request and form that cannot be parsed, so any client could fill the log; the guard logs failures.
    for name in ("uvicorn.error", "python_multipart"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    metrics = GatewayMetrics()
    door = Door(settings, metrics, _token(settings))
    service = GatewayServer(door)
    listener = HttpListener(settings, new_app(door), door)
    await process.serve(settings, service, listener, metrics.registry, {"kind": "gateway", "model": ""})
