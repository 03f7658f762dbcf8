"""Measures how many speakers a machine serves in real time: the seconds of sound that it makes in a second of computing."""

from __future__ import annotations

import time
from pathlib import Path

from omnistage.models.interface import Activity


def computing_s(thread: Activity | None, device: str) -> float:
    """Seconds on a clock that runs only while a thread computes, so that other work on the same CPU does not count. thread: None: the
    calling thread. With a GPU the clock always runs, because the CPU waits for the GPU."""
    if device != "cpu":
        return time.perf_counter()
    if thread is None:
        return time.thread_time()
    assert thread.thread_id is not None
    return int(Path(f"/proc/self/task/{thread.thread_id}/schedstat").read_text().split()[0]) / 1e9


def speakers_text(speakers: float) -> str:
    """The text of the setting `real_time_speakers`."""
    return f"{speakers:.1f}, measured, with nothing else on this machine"
