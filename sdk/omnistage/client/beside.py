"""Runs work on daemon threads. The work goes on if its caller is cancelled. At their end neither an event loop nor the interpreter waits
for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent import futures
from typing import TypeVar

T = TypeVar("T")


async def beside(work: Callable[[], T], name: str) -> T:
    """Return or raise the result of `work`, run on a daemon thread of this name. The work goes on if the caller is cancelled."""
    return await asyncio.wrap_future(on_thread(work, name))


def on_thread(work: Callable[[], T], name: str) -> futures.Future[T]:
    """Start `work` on a daemon thread. Several callers may wait for the future, each by `asyncio.wrap_future`; a cancelled one does not end
    the work."""
    future: futures.Future[T] = futures.Future()
    future.set_running_or_notify_cancel()  # From now on no caller can cancel the future, so it always gets a result.

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
