"""The memory of processes: huge pages, the most that one held, and files of shared memory, which others may have, too."""

from __future__ import annotations

import re
from pathlib import Path

from helpers.processes import open_files

HUGE_KIB = 2048


def has_huge_pages() -> bool:
    """Whether the kernel can be asked for them at once (Linux 6.1) and they are not switched off."""
    version = re.match(r"(\d+)\.(\d+)", Path("/proc/sys/kernel/osrelease").read_text())
    switch = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return version is not None and tuple(map(int, version.groups())) >= (6, 1) and switch.exists() and "[never]" not in switch.read_text()


def huge_kib(pid: int) -> tuple[int, int]:
    """Two shares of a process's private memory without a file, in KiB: what is in huge pages, and how much could be, by where it lies."""
    held = possible = 0
    whole = 0
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        key, *values = line.split()
        match key:
            case "Anonymous:":
                possible += min(int(values[0]), whole)
            case "AnonHugePages:":
                held += int(values[0])
            case _ if not key.endswith(":"):
                whole = _whole_kib(key) if values[0] == "rw-p" and values[3] == "0" else 0
    return held, possible


def _whole_kib(addresses: str) -> int:
    """The blocks of huge pages that lie in a mapping, together."""
    begin, end = (int(address, 16) >> 10 for address in addresses.split("-"))
    return max(0, end // HUGE_KIB - -(-begin // HUGE_KIB)) * HUGE_KIB


def peak_bytes(pid: int) -> int:
    """Peak resident memory of a process in bytes (proc(5), VmHWM)."""
    return _resident(pid, "VmHWM")


class Peak:
    """The most memory that a process held since the last look, in bytes."""

    def __init__(self, pid: int) -> None:
        self._pid, self.before = pid, _resident(pid, "VmRSS")
        Path(f"/proc/{pid}/clear_refs").write_text("5")

    @property
    def growth(self) -> int:
        return peak_bytes(self._pid) - self.before


def _resident(pid: int, name: str) -> int:
    """Resident memory of a process in bytes, by the name of its line in proc(5)."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(lines[name].split()[0]) << 10


MOUNT = Path("/dev/shm")
OURS = f"{MOUNT}/omnistage-"


def files_of(pid: int) -> set[str]:
    """The shared-memory files of omnistage that a process has mapped or open."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    mapped = {line.split(maxsplit=5)[5].removesuffix(" (deleted)") for line in maps if OURS in line}
    opened = {target for _, target in open_files(pid)}
    return {Path(name).name for name in mapped | {name for name in opened if name.startswith(OURS)}}


def left_of(names: set[str]) -> set[str]:
    """Those of these files that are still there."""
    return {name for name in names if (MOUNT / name).exists()}
