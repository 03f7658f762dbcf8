"""Tasks of a session that are given up, and what is left of one that failed."""

from __future__ import annotations

import asyncio
from typing import Any


def look_at_error(task: asyncio.Task[Any]) -> None:
    """An error that does not matter any more; asyncio complains of one that nobody looked at."""
    if not task.cancelled():
        task.exception()


async def cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait for their end; their errors were looked at already or do not matter any more."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        look_at_error(task)


def forget_traceback(error: BaseException) -> None:
    """Of an error that was told. Its frames hold the session, and the task that failed holds the error: together they would keep the media
    of the request until the collector comes by."""
    cause: BaseException | None = error
    while cause is not None:
        cause.__traceback__ = None
        cause = cause.__context__
