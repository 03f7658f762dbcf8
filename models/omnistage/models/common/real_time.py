"""How many speakers a machine carries in real time: the sound that is made in a second of computing."""

from __future__ import annotations

import time
from pathlib import Path

from omnistage.models.interface import Activity


def computing_s(thread: Activity | None, device: str) -> float:
    """By a clock of which only the time counts in which a thread computes: others who start on the same CPU do not. thread: None: that
    which asks. A GPU is waited for, so there the time counts that goes by."""
    if device != "cpu":
        return time.perf_counter()
    if thread is None:
        return time.thread_time()
    assert thread.thread_id is not None
    return int(Path(f"/proc/self/task/{thread.thread_id}/schedstat").read_text().split()[0]) / 1e9


def told(speakers: float) -> str:
    """The setting `real_time_speakers`."""
    return f"{speakers:.1f}, measured, with nothing else on this machine"
