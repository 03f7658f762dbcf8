"""Work beside the event loop for which nobody waits at the end: neither the loop, nor the interpreter, nor who is cancelled meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent import futures
from typing import TypeVar

T = TypeVar("T")


async def beside(work: Callable[[], T], name: str) -> T:
    """What `work` returns or raises, on a daemon thread of that name. It goes on if the caller is cancelled."""
    return await asyncio.wrap_future(on_thread(work, name))


def on_thread(work: Callable[[], T], name: str) -> futures.Future[T]:
    """The same, for several to wait for, each by `asyncio.wrap_future`; none of them ends it."""
    future: futures.Future[T] = futures.Future()
    future.set_running_or_notify_cancel()  # It has a result in any case: nobody is to cancel it.

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
