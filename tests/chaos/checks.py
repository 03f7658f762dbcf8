"""The checks when the load is over: nothing is held, nothing lies around, no log tells of a bug, and the processes have not grown: their
memory, open files and threads are sampled under load and at rest."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import TypeVar

from chaos.house import MOUNT, House
from helpers.metrics import fetched, value
from helpers.servers import all_free
from omnistage.connector.liveness import find_peer
from omnistage.connector.shm import PREFIX

T = TypeVar("T")

ORPHANS_LIMIT_S = 90.0
"""A sweep comes every minute, and judges no file that is younger than ten seconds."""

IDLE_LIMIT_S = 30.0

BUGS = re.compile(r'Traceback|session\.bug|request\.bug|never retrieved|never awaited|Task was destroyed|"level": "(error|critical)"')
LEFT = "raised in core by servicer method"
"""A message that gRPC logs with a traceback when the other end goes away while the status is sent to it."""

CUT = "drain.cut"


async def held(house: House) -> list[str]:
    """Sessions, leases and pages that a stage still holds after a bounded time, and answers that the router still runs. A process that is
    down is a fault of its own."""
    wrong = []
    try:
        await all_free([house.fleet.address(name) for name in house.fleet.stages if house.is_up(name)])
    except* AssertionError as group:
        wrong += [str(error) for error in group.exceptions]
    if not house.is_up("router"):
        return wrong
    running = await asyncio.to_thread(_settle, lambda: answers_of_router(house), IDLE_LIMIT_S)
    return wrong + ([f"the router still runs {running:g} answers"] if running else [])


def _settle(look: Callable[[], T], limit_s: float) -> T:
    """Look until nothing is there, in a thread; what was there at last. Nobody tells when a file or a number of another process changes."""
    deadline = time.monotonic() + limit_s
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def answers_of_router(house: House) -> float:
    """Its gauge of answers under way."""
    return value(fetched(house.fleet.server("router").metrics_address), "omnistage_router_inflight")


async def orphans(before: set[str]) -> list[str]:
    """Shared memory of dead processes that is left after a bounded time. before: what was there when all began."""
    found = await asyncio.to_thread(_settle, lambda: set(_orphans()) - before, ORPHANS_LIMIT_S)
    return [f"{name} belongs to nobody" for name in sorted(found)]


def files() -> set[str]:
    """All our shared memory."""
    return {path.name for path in MOUNT.glob(f"{PREFIX}*")}


def _orphans() -> Iterator[str]:
    """A producer that lives holds a record lock on the liveness file of its arena."""
    alive = {}
    for name in files():
        arena = name.rsplit("-", 1)[0]
        if arena not in alive:
            alive[arena] = _is_alive(arena)
        if not alive[arena]:
            yield name


def _is_alive(arena: str) -> bool:
    peer = find_peer(bytes.fromhex(arena.removeprefix(PREFIX)))
    return peer is not None and not peer.is_dead()


def logged(folder: Path) -> list[str]:
    """The signs of bugs in the logs, each one once."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.glob("*.log")):
        for line in path.read_text(errors="replace").splitlines():
            if BUGS.search(line) and LEFT not in line:
                found.setdefault(_told(line), []).append(path.name)
    return [f"{told} ({len(names)} times, first in {names[0]})" for told, names in found.items()]


def _told(line: str) -> str:
    """A log line without what differs from one time to the next."""
    try:
        entry = json.loads(line)
    except ValueError:
        return line[:200]
    last = str(entry.get("exception", "")).strip().rpartition("\n")[2]
    return f"{entry.get('event')}: {last or entry.get('message', '')}"[:300]


def cut_off(house: House) -> list[str]:
    """Servers that had something left to cut off when they were ended at last, although nobody asked them anything any more."""
    return [f"{name}: the last drain did not end by itself" for name in house.names if CUT in house.fleet.server(name).log()]


def zombies() -> list[str]:
    """Children of this process that ended and that nobody waited for."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = path.read_text().rpartition(")")
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, parent = rest.split()[:2]
        if state == "Z" and int(parent) == os.getpid():
            found.append(f"{name}) is a zombie")
    return found


ALLOWED_BYTES = 16 << 20
ALLOWED_FILES = 60
ALLOWED_THREADS = 12
"""The number of threads that a process may have at the end beyond the most that it had before it was warm."""


@dataclass(frozen=True, slots=True)
class MemorySample:
    """age_s: of the process, since its first sample. private_bytes: RssAnon of proc(5); shared memory is counted by leases."""

    age_s: float
    private_bytes: int
    files: int
    threads: int


@dataclass
class MemoryOfHouse:
    """Samples of every process that was ever seen. warm_s: age from which on it must not grow any more."""

    warm_s: float
    _begun: dict[int, float] = field(default_factory=dict)
    samples: dict[tuple[str, int], list[MemorySample]] = field(default_factory=dict)

    def sample(self, pids: dict[str, int]) -> None:
        """Look at the processes by name."""
        for name, pid in pids.items():
            age_s = time.monotonic() - self._begun.setdefault(pid, time.monotonic())
            try:
                status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
                files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
            except (FileNotFoundError, ProcessLookupError):
                continue  # It ended in between.
            if "RssAnon" in status:
                sample = MemorySample(age_s, int(status["RssAnon"].split()[0]) * 1024, files, int(status["Threads"]))
                self.samples.setdefault((name, pid), []).append(sample)

    def grown(self) -> list[tuple[str, MemorySample, MemorySample, bool]]:
        """Every process that lived for twice the time it takes to get warm: its name, the most before that, its end, whether it is flat."""
        found = []
        for (name, pid), samples in self.samples.items():
            if samples[-1].age_s >= 2 * self.warm_s:
                young = [astuple(sample) for sample in samples if sample.age_s <= self.warm_s]
                warm = MemorySample(*map(max, zip(*young, strict=True)))
                end = samples[-1]
                flat = (
                    end.private_bytes <= warm.private_bytes + ALLOWED_BYTES
                    and end.files <= warm.files + ALLOWED_FILES
                    and end.threads <= warm.threads + ALLOWED_THREADS
                )
                found.append((f"{name} ({pid})", warm, end, flat))
        return found
