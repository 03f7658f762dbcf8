"""The threads of processes as the kernel sees them: whether they run, and how long they have run and waited for a CPU."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class KernelThread:
    """A thread as the kernel sees it. state: R runs or waits for a CPU, S sleeps, D waits for a disk. cpu_s: seconds that it has run.
    delay_s: seconds that it has waited for a CPU."""

    state: str
    cpu_s: float
    delay_s: float


def read_threads(processes: Iterable[int] = ()) -> dict[int, KernelThread]:
    """The threads of this process and of the processes with the given ids, by thread number. Raises OSError if they cannot be read, for
    example because no descriptor is left."""
    threads = (folder for process in ("self", *processes) for folder in _folders(Path(f"/proc/{process}/task")))
    return {int(folder.name): thread for folder in threads if (thread := _thread(folder)) is not None}


def _folders(tasks: Path) -> list[Path]:
    """The folders of a process's threads; none if the process has ended."""
    try:
        return list(tasks.iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return []


def _thread(folder: Path) -> KernelThread | None:
    """Read a thread from its folder /proc/PID/task/NUMBER, proc(5) stat and schedstat; None if it has ended."""
    try:
        stat = (folder / "stat").read_text()
        if DELAYS_ARE_TOLD:
            cpu_ns, delay_ns, _ = (folder / "schedstat").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name may hold anything. After it come state (field 3) and, as fields 14 and 15, the ticks in user and kernel mode.
    fields = stat.rpartition(")")[2].split()
    if DELAYS_ARE_TOLD:
        return KernelThread(fields[0], int(cpu_ns) / 1e9, int(delay_ns) / 1e9)
    return KernelThread(fields[0], (int(fields[11]) + int(fields[12])) * _TICK_S, 0.0)


def _delays_are_told() -> bool:
    """Whether this kernel counts how long threads wait for a CPU. A kernel that does not has no such file, or zeros in it."""
    try:
        return Path("/proc/self/schedstat").read_text().split()[0] != "0"
    except OSError:
        return False


DELAYS_ARE_TOLD = _delays_are_told()
"""Whether this kernel counts delays. If not, run times are whole ticks of the kernel's clock, and delays are 0."""
