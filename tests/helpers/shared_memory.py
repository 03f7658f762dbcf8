"""The owners of shared memory: other stacks may run on the machine, and their memory comes and goes at any time."""

from __future__ import annotations

from pathlib import Path

from helpers.processes import open_files

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
