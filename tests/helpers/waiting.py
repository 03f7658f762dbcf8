"""To wait for something that tells nobody when it changes, such as a metric or a list."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LIMIT_S = 60.0

LOOK_S = 0.01
"""Between two looks."""


async def until(condition: Callable[[], object]) -> None:
    """Return when it holds. Raises TimeoutError after `LIMIT_S`."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
