"""Facts of a process from the kernel: CPU time, memory, wake-ups, and the processes that it started."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process since its start (proc(5), stat fields 14 and 15)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def peak_bytes(pid: int) -> int:
    """Peak resident memory of a process in bytes (proc(5), VmHWM)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"no VmHWM for process {pid}")


def wakeups(pid: int) -> int:
    """How often the threads that a process has now went to sleep by themselves since they began (proc(5), voluntary_ctxt_switches)."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    lines = [line for thread in threads for line in (thread / "status").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches:"))


def with_children(pid: int) -> list[int]:
    """The ids of a process, of its children and of their children."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    children = [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    return [pid, *(each for child in children for each in with_children(child))]


@dataclass
class CpuMeter:
    """Measures the CPU time of the processes `pids` since the meter was made."""

    pids: Sequence[int]

    def __post_init__(self) -> None:
        self._before = self._now()

    def _now(self) -> list[float]:
        return [cpu_seconds(pid) for pid in self.pids]

    def spent(self) -> list[float]:
        """CPU seconds of each process since the meter was made."""
        return [now_s - before_s for now_s, before_s in zip(self._now(), self._before, strict=True)]
