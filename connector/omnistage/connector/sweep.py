"""Removes the shared memory of producers that died without a chance to do it themselves (kill -9, a container that is killed).

Which files are orphans:
    of an arena with a liveness file    all, if the record lock on that file can be taken: its producer is dead
    a segment without a liveness file   if the producer's flock on the segment itself can be taken

A segment has no liveness file if somebody removed that file, or a sweep was cut short. A child that a dead producer had forked keeps the
flock until it ends, so such a segment may be removed late, but never while its producer lives.

Only regular files of this user with our names are removed. A file that is judged by its lock must be at least ten seconds old, because a
younger file may belong to a process that has created it and not locked it yet."""

import fcntl
import math
import os
import re
import stat
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from omnistage.connector.liveness import OWN
from omnistage.connector.locality import MOUNT
from omnistage.connector.shm import PREFIX

_NAME = re.compile(re.escape(PREFIX) + r"([0-9a-f]{32})-(live|[0-9]{1,10})")
_NEWBORN_S = 10.0


def sweep(*, limit_s: float = math.inf) -> int:
    """Unlink the files of dead producers. Return how many producers were found dead.

    Call it when a process starts, and now and then. Several sweeps at once do no harm, nor does a sweep that ends early. limit_s: seconds
    after which it begins nothing more, for callers that may not wait; the next sweep does the rest."""
    deadline = time.monotonic() + limit_s
    dead = 0
    for arena, kinds in _arenas(deadline).items():
        if time.monotonic() >= deadline:
            break
        if bytes.fromhex(arena) not in OWN:
            dead += _bury_arena(arena, kinds) if "live" in kinds else _bury_segments(arena, kinds)
    return dead


def _arenas(deadline: float) -> dict[str, list[str]]:
    """The arenas with files on the mount, by name in hex: for each file its ending, "live" or the number of a segment. deadline: the time
    (time.monotonic()) after which the list may be left incomplete."""
    endings: dict[str, list[str]] = {}
    try:
        with os.scandir(MOUNT) as entries:
            for entry in entries:
                match = _NAME.fullmatch(entry.name)
                if match is not None:
                    endings.setdefault(match[1], []).append(match[2])
                if time.monotonic() >= deadline:
                    break
    except OSError:
        return {}  # no shared memory here, so no orphans
    return endings


def _bury_arena(arena: str, kinds: list[str]) -> bool:
    """Remove the files of an arena if its producer is dead; return whether it is. kinds: endings of the files. The liveness file goes last,
    so that the next sweep can finish what a killed sweep has begun."""

    def remove() -> None:
        for kind in kinds:
            if kind != "live":
                _unlink_own(_path(arena, kind))
        _unlink_own(_path(arena, "live"))

    return _if_unlocked(_path(arena, "live"), fcntl.lockf, remove)


def _bury_segments(arena: str, numbers: list[str]) -> bool:
    """Remove segments without a liveness file if their producer is dead. Return whether any was removed."""
    paths = [_path(arena, number) for number in numbers]
    return sum(_if_unlocked(path, fcntl.flock, partial(_unlink_own, path)) for path in paths) > 0


def _if_unlocked(path: Path, lock: Callable[[int, int], object], act: Callable[[], None]) -> bool:
    """Lock a file and call `act`, if the file is ours, old enough and not locked. Return whether `act` was called."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False  # gone already, or not ours to touch
    try:
        facts = os.fstat(descriptor)
        newborn = 0 <= time.time() - facts.st_mtime < _NEWBORN_S  # a time in the future counts as old: the clock was set back
        if newborn or not _is_own_file(facts):
            return False
        try:
            lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False  # its producer holds the lock: alive
        act()
        return True
    finally:
        os.close(descriptor)


def _path(arena: str, kind: str) -> Path:
    return MOUNT / f"{PREFIX}{arena}-{kind}"


def _is_own_file(facts: os.stat_result) -> bool:
    return stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid()


def _unlink_own(path: Path) -> None:
    """Remove a file if it is still there and ours."""
    try:
        if _is_own_file(path.lstat()):
            path.unlink()
    except FileNotFoundError:
        return  # another sweep was here
