"""Removes the shared memory of producers that died without a chance to do it themselves (kill -9, power of the container)."""

import fcntl
import os
import re
import stat
import time
from pathlib import Path

from omnistage.connector.liveness import OWN
from omnistage.connector.locality import MOUNT
from omnistage.connector.shm import PREFIX, unlink

_LIVE = re.compile(re.escape(PREFIX) + r"([0-9a-f]{32})-live")
_NEWBORN_S = 10.0  # a younger file may belong to a process that has created it and not locked it yet


def sweep() -> int:
    """Unlink all segments of dead producers of this user; returns how many producers were found dead.

    A producer is dead when its liveness file can be locked. Call it when a process starts. Several sweeps at once do no harm.
    """
    if not MOUNT.is_dir():
        return 0
    found = [(path, _LIVE.fullmatch(path.name)) for path in MOUNT.iterdir()]
    return sum(1 for path, match in found if match is not None and bytes.fromhex(match[1]) not in OWN and _bury(path, match[1]))


def _bury(liveness: Path, arena: str) -> bool:
    """Remove one arena if its producer is dead. The liveness file goes last, so that a sweep that is killed is done again by the next."""
    try:
        descriptor = os.open(liveness, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False  # gone already, or not ours to touch
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid() or time.time() - facts.st_mtime < _NEWBORN_S:
            return False
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False  # its producer holds the lock: alive
        for path in MOUNT.glob(f"{PREFIX}{arena}-*"):
            if path != liveness:
                unlink(f"/{path.name}")
        unlink(f"/{liveness.name}")
        return True
    finally:
        os.close(descriptor)
