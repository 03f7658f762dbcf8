"""`python -m helpers.misled`: a router whose system fails in a way that nobody foresaw, from SIGUSR1 on, whenever a name is looked up."""

from __future__ import annotations

import asyncio
import signal
import sys

from omnistage.host.process import main
from omnistage.router.server import serve_router
from omnistage.router.settings import RouterSettings
from omnistage.wire.channel import Credentials


async def _serve(settings: RouterSettings, credentials: Credentials) -> None:
    loop = asyncio.get_running_loop()

    async def fail(*_: object, **__: object) -> None:
        raise AssertionError("told to fail")

    loop.add_signal_handler(signal.SIGUSR1, setattr, loop, "getaddrinfo", fail)
    await serve_router(settings, credentials)


if __name__ == "__main__":
    sys.exit(main("helpers.misled", RouterSettings, _serve))
