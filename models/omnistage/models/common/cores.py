"""How many cores this process may compute on at once."""

from __future__ import annotations

import os
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Of the container: microseconds of computing in each so many microseconds, or "max" for no limit."""


def cores(quota: Path = QUOTA) -> int:
    """Those that the process may run on, or fewer, one at least, where its container is given less time than they have."""
    here = len(os.sched_getaffinity(0))
    try:
        given, period = quota.read_text().split()
    except FileNotFoundError:
        return here
    return here if given == "max" else max(min(here, int(given) // int(period)), 1)
