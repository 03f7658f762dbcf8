"""Background work of a process: tasks that run as long as it, and threads that it can do without.

If a lasting task ends, or a thread ends by an error, the process ends too (process.py), because nobody else does that work. A spare thread
may fail on a machine with too few descriptors or threads, or too little memory: then the log says so and the process goes on. Larger pages
of memory, the page of metrics, and the log are the work of spare threads."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import structlog

log = structlog.get_logger(__name__)

T = TypeVar("T")
U = TypeVar("U")


async def end_tasks(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks, and wait until they have ended. Their results and errors are dropped."""
    ending = set(tasks)
    for task in ending:
        task.cancel()
    if ending:
        await asyncio.wait(ending)
    for task in ending:
        if not task.cancelled():
            task.exception()  # Read, so that asyncio does not log it.


async def first_of(work: Awaitable[T], other: Awaitable[U]) -> T | U:
    """Run two works at the same time until one has ended, then end the other. Returns the result of the first, or raises its error. If both
    have ended at once, `work` counts."""
    tasks = (asyncio.ensure_future(work), asyncio.ensure_future(other))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else tasks[1].result()
    finally:
        await end_tasks(tasks)


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
        await end_tasks(self._tasks)


SHORTAGES = (OSError, MemoryError, RuntimeError)
"""Errors that Python raises if a process has no descriptor (OSError), no memory or no further thread (RuntimeError) left."""

LONGEST_PAUSE_S = 3600.0

_SPARE: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def is_spare(thread: threading.Thread | None) -> bool:
    """Whether the process can do without this thread."""
    return thread is not None and thread in _SPARE


def start_spare(name: str, work: Callable[[], None], *, again_s: float | None = None) -> threading.Thread:
    """Do `work` on a daemon thread that the process can do without. If it fails, the log says so, and the process goes on.

    again_s: seconds from a failure to the next try, doubled with each further failure; None: no other try. If no thread can be started, the
    log says so, and the returned thread never runs.
    """
    thread = threading.Thread(target=_work, args=(name, work, again_s), name=name, daemon=True)
    _SPARE.add(thread)
    try:
        thread.start()
    except SHORTAGES as error:
        log.warning("thread.not_started", thread=name, why=repr(error))
    return thread


@contextmanager
def starting_spare() -> Iterator[None]:
    """Mark the threads that start while the block runs as spare. For libraries, which start threads of their own."""
    before = set(threading.enumerate())
    try:
        yield
    finally:
        _SPARE.update(set(threading.enumerate()) - before)


def _work(name: str, work: Callable[[], None], again_s: float | None) -> None:
    """Run by the thread: do `work`, and again after each failure, as `start_spare` says."""
    pause_s = again_s
    while True:
        try:
            work()
            return
        except Exception as error:
            log.warning("thread.failed", thread=name, again_s=pause_s, exc_info=error)
        if pause_s is None:
            return
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
