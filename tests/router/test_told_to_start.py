"""A router that is started beside its stages looks for them when it is told to: before, gRPC would pause between its attempts."""

from __future__ import annotations

import asyncio
import os

from helpers import waiting
from omnistage.router.server import serve_router
from omnistage.router.settings import RouterSettings
from omnistage.wire.channel import Credentials


async def test_it_looks_for_nobody_before_the_pipe_ends() -> None:
    knocked = asyncio.Event()

    def knock(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        knocked.set()
        writer.close()

    stage = await asyncio.start_server(knock, "127.0.0.1", 0)
    host, port = stage.sockets[0].getsockname()
    wait_fd, go_fd = os.pipe()
    stages = tuple((kind, f"{host}:{port}") for kind in ("thinker", "talker", "code2wav"))
    serving = asyncio.create_task(serve_router(RouterSettings(pipeline=("toy",), stages=stages, start_fd=wait_fd), Credentials()))
    try:
        async with waiting.turning() as turns:
            await waiting.until(lambda: turns() > 1000)
        assert not knocked.is_set() and not serving.done()
        os.close(go_fd)
        async with asyncio.timeout(60):
            await knocked.wait()
    finally:
        serving.cancel()
        await asyncio.wait({serving})
        stage.close()
