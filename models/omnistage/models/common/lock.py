"""A file lock that one process at a time can hold. The system frees the lock when the process ends in any way."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from omnistage.models.common.progress import ShowProgress

WAITING = "another process fetches; waiting"
LOOK_S = 0.5
"""Seconds between two looks at the other process's progress."""


@contextmanager
def hold_lock(path: Path, progress: ShowProgress, byte_counts: Callable[[], tuple[int, int | None]]) -> Iterator[None]:
    """Hold the lock on a file while the context is open. While another process holds it, wait and show that process's progress every
    LOOK_S. byte_counts: returns (number of bytes that the other process has fetched, number of all bytes, or None if that is not known).

    The wait has no limit, because the other process may fetch much; if that process ends, its lock is freed."""
    with path.open("a") as file:
        if not _try_lock(file):
            while True:
                progress(WAITING, *byte_counts(), "bytes")
                time.sleep(LOOK_S)
                if _try_lock(file):
                    break
            progress(WAITING, 1.0)
        yield


def _try_lock(file: TextIO) -> bool:
    """Lock the file if no other process holds it. Returns whether it is locked now."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
