"""What the processes of a stack may take of the machine on which other things run too."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROUTER_BYTES = 8 << 30
"""Of memory, for a router: two dozen requests of 50 MiB that come at once took 3.4 GiB, as measured. Headers of a few KiB that name each
other on the wire become gigabytes before anybody looks at them (docs/security.md): a router that has this much ends alone, and is started
again."""

ROUTER_SHARE = 0.75
"""The same as a part of the memory of this machine, where that is less."""

LEAST_BYTES = 3 << 30
"""A router that does nothing has mapped a GiB, most of which it never touches, and one with all its threads two; all of that counts."""

STAGE_OOM_SCORE = 500
"""As /proc/PID/oom_score_adj: where no memory is left, the kernel ends a stage, which is started again while others go on, before a shell
or a desktop; or a decoder of a stage, which is its child."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of one process and its children. memory_bytes: that it may map for itself; None: any. oom_score: how readily the kernel ends it."""

    memory_bytes: int | None = None
    oom_score: int = 0

    def put_on(self, pid: int) -> None:
        """From now on. One that has ended needs none. Where the kernel does not let anybody say whom to end, it chooses by size."""
        with suppress(ProcessLookupError):
            if self.memory_bytes is not None:
                hard = resource.prlimit(pid, resource.RLIMIT_DATA)[1]
                least = self.memory_bytes if hard == resource.RLIM_INFINITY else min(self.memory_bytes, hard)
                resource.prlimit(pid, resource.RLIMIT_DATA, (least, hard))
        if self.oom_score:
            with suppress(OSError):
                score = Path(f"/proc/{pid}/oom_score_adj")
                score.write_text(str(max(int(score.read_text()), self.oom_score)))

    def told(self) -> str:
        """What may have ended a process that gave up; empty where nothing was bounded."""
        if self.memory_bytes is None:
            return ""
        return f"; it may map {self.memory_bytes / (1 << 30):.1f} GiB of memory, and one that needs more ends so"


def for_router() -> Bounds:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Bounds(memory_bytes=max(min(ROUTER_BYTES, int(ROUTER_SHARE * physical)), LEAST_BYTES))


def for_stage() -> Bounds:
    return Bounds(oom_score=STAGE_OOM_SCORE)
