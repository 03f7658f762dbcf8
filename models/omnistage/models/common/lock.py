"""One process at a time, by a file that the system unlocks when a process ends, however it ends."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from omnistage.models.common.progress import Progress

WAITING = "another process fetches; waiting"
LOOK_S = 0.5
"""How often is looked whether it is ready, and how far it is."""


@contextmanager
def locked(path: Path, progress: Progress, came: Callable[[], tuple[int, int | None]]) -> Iterator[None]:
    """Hold a lock file. While another process holds it, that is told at once, with `came`: how many bytes it has by now, and of how many.

    It is waited for as long as it lives: what it fetches may be large, and its end frees the lock."""
    with path.open("a") as file:
        if not _took(file):
            while True:
                progress(WAITING, *came(), "bytes")
                time.sleep(LOOK_S)
                if _took(file):
                    break
            progress(WAITING, 1.0)
        yield


def _took(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
