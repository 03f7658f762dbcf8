"""How much memory is free, measured, and how it is written for humans."""

from __future__ import annotations

from pathlib import Path

import torch

_MEMINFO = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")
_ROLLUP = Path("/proc/self/smaps_rollup")


def free_bytes(device: str, share: float = 0.0) -> int:
    """Bytes that a model may still take on a device.

    Of a GPU: what its driver says is free, less the part of the whole that it is not to fill (share: above 0 to 1; 0: 0.9). Of a CPU: what
    the kernel can give without swapping, or less where a control group (a container) has a limit."""
    if device != "cpu":
        free, total = torch.cuda.mem_get_info(device)
        return max(int(free - (1 - (share or 0.9)) * total), 0)
    free = _kilobytes(_MEMINFO, "MemAvailable")
    most, used = _GROUP / "memory.max", _GROUP / "memory.current"
    if most.is_file() and used.is_file() and (limit := most.read_text().strip()).isdigit():
        free = min(free, int(limit) - int(used.read_text()))
    return max(free, 0)


def private_bytes() -> int:
    """Bytes of this process that no other one can share with it."""
    return _kilobytes(_ROLLUP, "Private_Dirty")


def _kilobytes(path: Path, name: str) -> int:
    """A line such as "MemAvailable: 123 kB" of a file of the kernel, in bytes."""
    for line in path.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise OSError(f"{path} has no line {name}")


def written(size: int) -> str:
    """A number of bytes for humans."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size} B"
