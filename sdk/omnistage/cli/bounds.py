"""Limits on the memory that the processes of a stack may take of their machine, on which other programs run too."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROUTER_BYTES = 12 << 30
"""Memory that a router may map. Headers of a few KiB that name each other on the wire become gigabytes before any check (docs/security.md):
a router that needs more than this is killed, alone, and is started again."""

ROUTER_SHARE = 0.75
"""The part of this machine's memory that a router may map, if that is less than ROUTER_BYTES."""

HONEST_BYTES = 6 << 30
"""A router gets no lower bound than this, because a busy honest one would be killed. Two dozen requests of 50 MiB at once took 3.4 GiB, as
measured; and a router maps up to 2 GiB that it never touches, which count too."""

STAGE_OOM_SCORE = 500
"""Written to /proc/PID/oom_score_adj. When memory runs out, the kernel kills a stage, or its child that decodes, before a shell or a
desktop: the stage is started again while others go on."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of one process and its children. memory_bytes: how much memory it may map; None: any. oom_score: how readily the kernel kills
    it when memory runs out, up to 1000; 0: as any process."""

    memory_bytes: int | None = None
    oom_score: int = 0

    def put_on(self, pid: int) -> None:
        """Apply the bounds to a process; nothing happens if it has ended. If this process may not set them, as in some sandboxes, there is
        no bound on memory, and the kernel chooses by size what it kills."""
        with suppress(OSError):
            if self.memory_bytes is not None:
                hard = resource.prlimit(pid, resource.RLIMIT_DATA)[1]
                least = self.memory_bytes if hard == resource.RLIM_INFINITY else min(self.memory_bytes, hard)
                resource.prlimit(pid, resource.RLIMIT_DATA, (least, hard))
        if self.oom_score:
            with suppress(OSError):
                score = Path(f"/proc/{pid}/oom_score_adj")
                score.write_text(str(max(int(score.read_text()), self.oom_score)))

    def told(self) -> str:
        """The end of a message about a process that ended by itself: its bound on memory, which may be the cause; empty: it has none."""
        if self.memory_bytes is None:
            return ""
        return f"; it may map {self.memory_bytes / (1 << 30):.1f} GiB of memory, and ends so when it needs more"


def memory_of_machine() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def for_router(machine_bytes: int) -> Bounds:
    """The bounds of a router on a machine with so much memory. If the machine is too small for a bound on memory, the kernel kills the
    router as readily as a stage."""
    most = min(ROUTER_BYTES, int(ROUTER_SHARE * machine_bytes))
    return Bounds(memory_bytes=most) if most >= HONEST_BYTES else Bounds(oom_score=STAGE_OOM_SCORE)


def for_stage() -> Bounds:
    return Bounds(oom_score=STAGE_OOM_SCORE)
