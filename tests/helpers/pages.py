"""The pages that the kernel of this machine has."""

from __future__ import annotations

import re
from pathlib import Path

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
