"""A process that can open only a few files more."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def few_descriptors(left: int) -> Iterator[None]:
    """This process can open so many files more. The limit is one of their numbers, and lower ones may be free: these are taken first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(int(path.name) for path in Path("/proc/self/fd").iterdir()) + 1 + left, hard))
        with suppress(OSError):
            while True:
                held.append(os.dup(2))
        for _ in range(left):
            os.close(held.pop())
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
