"""The number of cores on which this process may compute at once."""

from __future__ import annotations

import os
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""The container's limit as two numbers: microseconds of computing in each period, or "max" for no limit; and microseconds of the period."""


def cores(quota: Path = QUOTA) -> int:
    """The number of cores that this process may run on; fewer, but at least one, if its container gets less computing time."""
    here = len(os.sched_getaffinity(0))
    try:
        given, period = quota.read_text().split()
    except FileNotFoundError:
        return here
    return here if given == "max" else max(min(here, int(given) // int(period)), 1)
