"""A machine that has other things to do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

LOOPS_PER_CORE = 4


@contextmanager
def busy_cores() -> Iterator[None]:
    """Processes that want all there is of every core: four to a core, so that whoever else wants it gets a fifth of it or less."""
    loops: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(LOOPS_PER_CORE * (os.cpu_count() or 1)):
            loops.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
