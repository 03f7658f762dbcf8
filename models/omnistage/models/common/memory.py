"""Measures the memory that is free, and the memory that this process has taken."""

from __future__ import annotations

from pathlib import Path

import torch

from omnistage.models.humans import bytes_told

_MEMINFO = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")
_ROLLUP = Path("/proc/self/smaps_rollup")
_MAPS = Path("/proc/self/maps")


FILLED = 0.9
"""Part of a GPU's memory, from 0 to 1, that processes fill by default."""


def free_bytes(device: str, filled: float = 0.0, share: float = 1.0) -> int:
    """Number of bytes that a model may still take on a device after its weights are loaded.

    On a GPU: the bytes that its driver reports as free, less the part of the GPU that must stay empty. filled: part of the GPU that may be
    filled, above 0 to 1; 0: FILLED. On a CPU: the bytes that the kernel can give without swapping, or less if a control group (a container)
    has a limit. share: see LoadOptions."""
    if device != "cpu":
        free, total = torch.cuda.mem_get_info(device)
        return part_of_gpu(free, total, torch.cuda.memory_reserved(device), filled or FILLED, share)
    free = _kilobytes(_MEMINFO, "MemAvailable")
    limit_file, usage_file = _GROUP / "memory.max", _GROUP / "memory.current"
    if limit_file.is_file() and usage_file.is_file() and (limit := limit_file.read_text().strip()).isdigit():
        free = min(free, int(limit) - int(usage_file.read_text()))
    return part_of_cpu(max(free, 0), private_bytes(), share)


def part_of_gpu(free: int, total: int, own_bytes: int, filled: float, share: float) -> int:
    """Bytes that this process may still take on a GPU. free, total: bytes of the GPU. own_bytes: those that this process has taken. filled:
    part of the GPU that all processes may fill. share: part of those bytes for this process. It is a share of the whole, because with a
    share of the free bytes the first of two equal servers would get more than the second, which finds less free."""
    return max(min(int(free - (1 - filled) * total), int(share * filled * total) - own_bytes), 0)


def part_of_cpu(free: int, own_bytes: int, share: float) -> int:
    """Bytes that this process may still take on a CPU: its share of the memory that was free before it took `own_bytes`, minus these bytes.
    It is no share of the whole memory, because other work of the machine uses a part of that."""
    return max(int(share * (free + own_bytes)) - own_bytes, 0)


def private_bytes() -> int:
    """Bytes of memory that belong to this process alone: those that no file backs ("Anonymous"). Dirty pages are no measure: a page of a
    file that was just written is dirty and still shared."""
    return _kilobytes(_ROLLUP, "Anonymous")


def mapped_bytes(folder: Path) -> int:
    """Bytes of the files in a folder that this process has mapped, whether they are in memory now or not."""
    files = {str(path.resolve()) for path in folder.iterdir()}
    lines = (line.split(maxsplit=5) for line in _MAPS.read_text().splitlines())
    spans = [line[0].split("-") for line in lines if len(line) == 6 and line[5] in files]
    return sum(int(end, 16) - int(begin, 16) for begin, end in spans)


def memory_texts(folder: Path) -> dict[str, str]:
    """Name -> text on the memory that a model has taken, for its info. folder: its checkpoint; weights may be mapped from its files."""
    mapped = mapped_bytes(folder)
    shared = f"{bytes_told(mapped)} of weights as they are in the files, once for all replicas of this machine"
    return {
        "private_memory": f"{bytes_told(private_bytes())} of this process alone, the cache as far as it was touched",
        "shared_memory": shared if mapped else "none: all weights were packed or converted",
    }


def _kilobytes(path: Path, name: str) -> int:
    """Bytes from the line of this name, such as "MemAvailable: 123 kB", in a file of the kernel. Raises OSError if there is none."""
    for line in path.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise OSError(f"{path} has no line {name}")
