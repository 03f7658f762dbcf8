"""Threads that a process can do without, for example for larger pages of memory, the page of metrics, and the log.

If any other thread ends by an error, the process ends, because no other thread does that work (process.py). A spare thread may fail on a
machine with too few descriptors or threads, or too little memory: then the log says so and the process goes on.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog

log = structlog.get_logger(__name__)

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
