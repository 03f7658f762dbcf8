"""The kernel's view of a replica's process, for the log: why a silent replica may be silent.

A process is looked at only if it belongs to this user, runs on this machine and listens at the replica's address. Its number alone is not
enough: in a container the same number may belong to another process. The log gets only numbers, a state and the function of the kernel in
which the process sleeps.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from omnistage.connector import shm

PROC = Path("/proc")
LISTENS = "0A"
"""State of a listening socket in proc(5) net/tcp."""

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """A process as proc(5) stat shows it. start_ticks: start of the process, in ticks of the kernel since the boot. read_at_s: moment
    of the reading, in time.monotonic() seconds."""

    state: str
    major_faults: int
    cpu_s: float
    threads: int
    start_ticks: int
    read_at_s: float


class ReplicaProcess:
    """The process of the replica at `address`. No method raises: if the kernel shows nothing of the process, `describe` returns nothing."""

    def __init__(self, address: str) -> None:
        self._port = address.rpartition(":")[2]
        self._pid = 0
        self._last_sample: ProcessSample | None = None  # at the last sign of life
        self._proven_start = -1  # `start_ticks` of the process that was seen to listen at the address

    def is_at(self, pid: int, boot_id: str) -> None:
        """Note the process that the replica says it is, on the host with this boot id. A process on another host is not looked at."""
        pid = pid if boot_id == shm.boot_id() else 0
        if pid != self._pid:
            self._pid, self._last_sample, self._proven_start = pid, None, -1

    def note_sign_of_life(self) -> None:
        """Note a sign of life of the replica: `since_s` counts from here."""
        self._last_sample = _sample(self._pid)

    def describe(self) -> dict[str, object]:
        """Fields for a line of the log: `process` and `machine`; empty if the process is not known here."""
        sample = _sample(self._pid)
        if sample is None or not self._is_replica(sample):
            return {}
        return {"process": {**_process_fields(self._last_sample, sample), **_sleeps_in(self._pid)}, "machine": machine_fields()}

    def _is_replica(self, sample: ProcessSample) -> bool:
        """Whether the sampled process listens at the replica's port. A process that was once seen to listen is not looked up again, because
        the table of sockets may be long."""
        if self._proven_start != sample.start_ticks and _listens(self._pid, self._port):
            self._proven_start = sample.start_ticks
        return self._proven_start == sample.start_ticks


def _process_fields(before: ProcessSample | None, sample: ProcessSample) -> dict[str, object]:
    """Fields for the log: the state now, and what the process did since the sample before, if it is the same process."""
    fields: dict[str, object] = {"state": sample.state, "threads": sample.threads}
    if before is not None and before.start_ticks == sample.start_ticks:
        fields["since_s"] = round(sample.read_at_s - before.read_at_s, 3)
        fields["cpu_s"] = round(sample.cpu_s - before.cpu_s, 3)
        fields["major_faults"] = sample.major_faults - before.major_faults
    return fields


def _sample(pid: int) -> ProcessSample | None:
    """Read the figures of a process now; None if it has ended or may not be read, or for pid 0."""
    if pid <= 0:
        return None
    try:
        # Field 2, the name in brackets, may contain anything, so the rest begins after the last bracket: field n is fields[n - 3].
        fields = (PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
        # The state is field 3, the major faults 12, the CPU times 14 and 15, the threads 20, the start 22.
        cpu_s = (int(fields[11]) + int(fields[12])) * _TICK_S
        return ProcessSample(fields[0].decode(), int(fields[9]), cpu_s, int(fields[17]), int(fields[19]), time.monotonic())
    except (OSError, ValueError, IndexError):  # The process has ended, or belongs to another user.
        return None


def _listens(pid: int, port: str) -> bool:
    """Whether a process holds a socket that listens at this port."""
    try:
        port_text = f":{int(port):04X}"
        lines = [line.split() for table in ("tcp", "tcp6") for line in _lines(PROC / "self/net" / table)]
        # Word 1 of a line is the local address, 3 the state, and 9 the inode of the socket.
        sockets = {f"socket:[{line[9]}]" for line in lines if len(line) > 9 and line[1].endswith(port_text) and line[3] == LISTENS}
        return bool(sockets) and not sockets.isdisjoint(_descriptors(pid))
    except (OSError, ValueError):  # The process belongs to another user or has ended, or the port is invalid.
        return False


def _lines(path: Path) -> list[str]:
    """Lines of a file; empty if the kernel has no such file, as a kernel without IPv6."""
    return path.read_text().splitlines() if path.exists() else []


def _descriptors(pid: int) -> set[str]:
    """The targets of a process's open descriptors, such as socket:[1234]."""
    targets = set()
    for descriptor in (PROC / str(pid) / "fd").iterdir():
        with suppress(FileNotFoundError):
            targets.add(str(descriptor.readlink()))
    return targets


def _sleeps_in(pid: int) -> Mapping[str, str]:
    """The field `wchan`: the kernel's function in which the process sleeps; empty if it is not known. The kernel shows 0 to users who may
    not read the field."""
    try:
        name = (PROC / str(pid) / "wchan").read_text()
    except OSError:
        return {}
    return {"wchan": name} if name not in ("", "0") else {}


def machine_fields() -> dict[str, object]:
    """Fields for the log: the machine's load of the last minute, and the percentages of the last ten seconds in which some task waited for
    the processor, the disk or memory."""
    fields: dict[str, object] = {}
    try:
        fields["load"] = round(os.getloadavg()[0], 2)
        for resource in ("cpu", "io", "memory"):
            # The first line is "some avg10=0.00 avg60=...".
            fields[f"{resource}_pressure"] = float((PROC / "pressure" / resource).read_text().split()[1].partition("=")[2])
    except (OSError, ValueError, IndexError):  # This kernel does not count it.
        return fields
    return fields
