"""Tasks that run as long as their process. If one of them ends, the process ends too, unless the process can do without its work."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine

import structlog

log = structlog.get_logger(__name__)


class LastingTasks:
    """The lasting tasks of a process, made in its running event loop. broken: a future that gets the reason when a task has ended before
    `close`."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self.broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def start(self, name: str, work: Coroutine[None, None, None]) -> None:
        """Run `work`, which never ends by itself. name: shown in the log."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_end)

    def repeat(self, name: str, period_s: float, work: Callable[[], Awaitable[None]]) -> None:
        """Do `work` once in every period. The process can do without it: if it fails, the log says so, and the next period tries again."""

        async def again_and_again() -> None:
            while True:
                await asyncio.sleep(period_s)
                try:
                    await work()
                except Exception as error:
                    log.warning("task.failed", task=name, again_s=period_s, exc_info=error)

        self.start(name, again_and_again())

    def _on_end(self, task: asyncio.Task[None]) -> None:
        """Called when a task has ended. If that happens before `close`, `broken` is done."""
        self._tasks.discard(task)
        if self.broken.done():
            return
        error = None if task.cancelled() else task.exception()
        log.critical("task.broken", task=task.get_name(), exc_info=error)
        self.broken.set_result(f"task {task.get_name()} ended")

    async def close(self) -> None:
        """Cancel all tasks and wait for their end, which breaks nothing any more."""
        self.broken.cancel()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
