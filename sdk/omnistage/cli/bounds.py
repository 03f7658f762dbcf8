"""Limits on the memory that the processes of a stack may take of their machine, on which other programs run too."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SHARE = 0.75
"""The part of a machine's memory that one server may map: a router of all of it, a stage of what it leaves when its model is loaded."""

ROUTER_BYTES = 12 << 30
"""Memory that a router may map at most. Headers of a few KiB that name each other on the wire become gigabytes before any check
(docs/security.md): a server that needs more than its bound is killed, alone, and is started again."""

MIN_ROUTER_BYTES = 2 << 30
"""A router gets no lower bound than this: it maps 1.1 GiB before its first request, most of which it never touches."""

MIN_ROOM_BYTES = 2 << 30
"""A stage may map so much more than when its model was loaded, however little the model leaves: what is mapped is mostly not touched."""

OOM_SCORE = 500
"""Written to /proc/PID/oom_score_adj. When memory runs out, the kernel kills a server, or its child that decodes, before a shell or a
desktop: the server is started again while others go on."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of one server process. memory_bytes: how much memory it may map from its start on; None: any, until it serves. rest_share: the
    part of the machine's memory, beyond what the server has mapped when it serves, that it may map from then on; None: no other bound."""

    memory_bytes: int | None = None
    rest_share: float | None = None

    def put_on(self, pid: int) -> int | None:
        """Apply the bounds to a process that starts; nothing happens if it has ended. Returns its bound on memory. If this process may not
        set bounds, as in some sandboxes, there is none, and the kernel chooses by size what it kills."""
        with suppress(OSError):
            score = Path(f"/proc/{pid}/oom_score_adj")
            score.write_text(str(max(int(score.read_text()), OOM_SCORE)))
        return None if self.memory_bytes is None else _bound_memory(pid, self.memory_bytes)

    def put_on_serving(self, pid: int, machine_bytes: int) -> int | None:
        """Apply the bounds to a process that serves, on a machine with so much memory. Returns its bound on memory; None: as before."""
        if self.rest_share is None:
            return None
        with suppress(OSError):
            mapped_bytes = mapped(pid)
            if mapped_bytes < machine_bytes:  # A driver of a GPU maps more than there is.
                room_bytes = max(int(self.rest_share * (machine_bytes - mapped_bytes)), MIN_ROOM_BYTES)
                return _bound_memory(pid, mapped_bytes + room_bytes)
        return None


def _bound_memory(pid: int, memory_bytes: int) -> int | None:
    """Set the memory that a process may map. Returns it; None if it cannot be set."""
    with suppress(OSError):
        hard = resource.prlimit(pid, resource.RLIMIT_DATA)[1]
        soft = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
        resource.prlimit(pid, resource.RLIMIT_DATA, (soft, hard))
        return soft
    return None


def mapped(pid: int) -> int:
    """Bytes that a process has mapped, as its bound counts them. Raises OSError if it has ended."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:")), 0)


def memory_of_machine() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def for_router(machine_bytes: int) -> Bounds:
    """The bounds of a router, and of a gateway, on a machine with so much memory."""
    return Bounds(memory_bytes=max(min(ROUTER_BYTES, int(SHARE * machine_bytes)), MIN_ROUTER_BYTES))


def for_stage() -> Bounds:
    return Bounds(rest_share=SHARE)


def bound_text(memory_bytes: int | None) -> str:
    """The end of a message about a process that ended by itself: its bound on memory, which may be the cause; empty: it has none."""
    if memory_bytes is None:
        return ""
    return f"; it may map {memory_bytes / (1 << 30):.1f} GiB of memory, and ends so when it needs more"
