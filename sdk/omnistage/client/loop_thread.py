"""The event loop behind the sync client: one thread per process, shared by every `Omni`, ended with the last of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, ClassVar, Self, TypeVar

T = TypeVar("T")


class LoopThread:
    """A running event loop. Two clients share it because gRPC's asyncio layer does its polling per process, not per loop."""

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _shared: ClassVar[LoopThread | None] = None
    _users: ClassVar[int] = 0

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        started = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._main(started),), name="omnistage-client", daemon=True)
        self._thread.start()
        started.wait()

    async def _main(self, started: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        started.set()
        await self._stop.wait()

    @classmethod
    def acquire(cls) -> Self:
        """The shared loop; started by the first user."""
        with cls._lock:
            if cls._shared is None:
                cls._shared = cls()
            cls._users += 1
            shared: Self = cls._shared  # type: ignore[assignment]
            return shared

    @classmethod
    def release(cls) -> None:
        """Give it back; the last user ends it and waits for the thread."""
        with cls._lock:
            cls._users -= 1
            if cls._users or cls._shared is None:
                return
            shared, cls._shared = cls._shared, None
        shared._loop.call_soon_threadsafe(shared._stop.set)
        if threading.current_thread() is not shared._thread:
            shared._thread.join()

    @property
    def is_current(self) -> bool:
        """True on the loop's own thread, which must never wait for `run`."""
        return threading.current_thread() is self._thread

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop and wait for it. An interrupt of this thread cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()
