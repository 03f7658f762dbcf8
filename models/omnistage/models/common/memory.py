"""How much memory is free, measured, and how it is written for humans."""

from __future__ import annotations

from pathlib import Path

import torch

_MEMINFO = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")
_ROLLUP = Path("/proc/self/smaps_rollup")


FILLED = 0.9
"""Part of a GPU's memory that is filled, unless somebody says otherwise."""


def free_bytes(device: str, filled: float = 0.0, share: float = 1.0) -> int:
    """Bytes that a model, whose weights are loaded, may still take on a device.

    Of a GPU: what its driver says is free, less the part of the whole that is not to be filled (filled: above 0 to 1; 0: FILLED). Of a CPU:
    what the kernel can give without swapping, or less where a control group (a container) has a limit. share: see LoadOptions."""
    if device != "cpu":
        free, total = torch.cuda.mem_get_info(device)
        return part_of_gpu(free, total, torch.cuda.memory_reserved(device), filled or FILLED, share)
    free = _kilobytes(_MEMINFO, "MemAvailable")
    most, used = _GROUP / "memory.max", _GROUP / "memory.current"
    if most.is_file() and used.is_file() and (limit := most.read_text().strip()).isdigit():
        free = min(free, int(limit) - int(used.read_text()))
    return part_of_cpu(max(free, 0), private_bytes(), share)


def part_of_gpu(free: int, total: int, own: int, filled: float, share: float) -> int:
    """What is left of a share of the part that is filled. own: bytes that this process has. Of the whole and not of what is free: the
    first of two equal servers would get more than the second, which finds what the first has taken."""
    return max(min(int(free - (1 - filled) * total), int(share * filled * total) - own), 0)


def part_of_cpu(free: int, own: int, share: float) -> int:
    """What is left of a share of all that was free before this process took its own. The whole tells nothing here: the rest of it is in
    use by whatever else the machine does."""
    return max(int(share * (free + own)) - own, 0)


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
