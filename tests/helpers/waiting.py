"""To wait for something that tells nobody when it changes, such as a metric or a list; and to see that others run while one waits."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

LIMIT_S = 60.0

LOOK_S = 0.01
"""Between two looks."""


async def until(condition: Callable[[], object]) -> None:
    """Return when it holds. Raises TimeoutError after `LIMIT_S`."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)


async def until_collected(condition: Callable[[], object]) -> None:
    """As `until`, with the collector before each look: a thread holds what it has computed with for a moment longer."""
    await until(lambda: gc.collect() >= 0 and condition())


@asynccontextmanager
async def turning() -> AsyncIterator[Callable[[], int]]:
    """Turns that the event loop has taken so far: others run on it while the test waits."""
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(turn())
    try:
        yield lambda: turns
    finally:
        task.cancel()
