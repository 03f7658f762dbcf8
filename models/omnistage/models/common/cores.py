"""The number of cores on which this process may compute at once."""

from __future__ import annotations

import os
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""The container's limit as two numbers: microseconds of computing in each period, or "max" for no limit; and microseconds of the period."""


def cores(quota: Path = QUOTA) -> int:
    """The number of cores that this process may run on; fewer, but at least one, if its container gets less computing time."""
    core_count = len(os.sched_getaffinity(0))
    try:
        limit, period = quota.read_text().split()
    except FileNotFoundError:
        return core_count
    return core_count if limit == "max" else max(min(core_count, int(limit) // int(period)), 1)
