"""The number of speakers that a machine carries in real time: the seconds of sound made in a second of computing."""

from __future__ import annotations

import time
from pathlib import Path

from omnistage.models.interface import Activity


def computing_s(thread: Activity | None, device: str) -> float:
    """Seconds on a clock that counts only the time in which a thread computes; other work that starts on the same CPU does not count.
    thread: None: the calling thread. The CPU waits for a GPU, so there all time counts."""
    if device != "cpu":
        return time.perf_counter()
    if thread is None:
        return time.thread_time()
    assert thread.thread_id is not None
    return int(Path(f"/proc/self/task/{thread.thread_id}/schedstat").read_text().split()[0]) / 1e9


def speakers_text(speakers: float) -> str:
    """The text of the setting `real_time_speakers`."""
    return f"{speakers:.1f}, measured, with nothing else on this machine"
