"""The checks when the load is over: nothing is held, nothing lies around, and no log tells of a bug."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Callable, Iterator
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
