"""Shows that a process's arena is alive, by a record lock on a file, which the kernel drops when the process ends, and removes the shared
memory of producers that died without a chance to do it themselves (kill -9, a container that is killed).

A process id would not do (containers use the same numbers, ids are reused), nor would flock (a forked child keeps it).

Which files are orphans:
    of an arena with a liveness file    all, if the record lock on that file can be taken: its producer is dead
    a segment without a liveness file   if the producer's flock on the segment itself can be taken

A segment has no liveness file if somebody removed that file, or a sweep was cut short. A child that a dead producer had forked keeps the
flock until it ends, so such a segment may be removed late, but never while its producer lives.

Only regular files of this user with our names are removed. A file that is judged by its lock must be at least ten seconds old, because a
younger file may belong to a process that has created it and not locked it yet."""

from __future__ import annotations

import fcntl
import math
import os
import re
import secrets
import stat
import struct
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

from omnistage.connector.shm import MOUNT, PREFIX, create_file, liveness_name, unlink

ARENA_ID_BYTES = 16

OWN_ARENAS: set[bytes] = set()
"""Arenas of this process. No code here may open their files: closing any descriptor of a file drops the process's lock on it."""

_ATTEMPTS = 3
_FLOCK = struct.Struct("hhqqi4x")  # struct flock on 64-bit Linux (fcntl(2)): type, whence, start, length, process


class Liveness:
    """The locked file of one new arena, from creation to `close`."""

    def __init__(self) -> None:
        """Draw the arena's name, create its file and lock it. Raises OSError."""
        for attempt in range(_ATTEMPTS):
            self.arena = secrets.token_bytes(ARENA_ID_BYTES)
            try:
                self._create()
            except (BlockingIOError, FileNotFoundError):  # this process slept so long that a sweep took the file for an orphan
                if attempt == _ATTEMPTS - 1:
                    raise
            else:
                return

    def _create(self) -> None:
        """Create the file of `arena` and lock it. Raises OSError with nothing left."""
        OWN_ARENAS.add(self.arena)  # first, because a sweep may run in another thread
        try:
            self._fd = create_file(liveness_name(self.arena))
        except OSError:
            OWN_ARENAS.discard(self.arena)
            raise
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(self._fd).st_nlink == 0:
                raise FileNotFoundError("the liveness file was removed while it was made")
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Remove the file and drop the lock."""
        unlink(liveness_name(self.arena))
        os.close(self._fd)
        OWN_ARENAS.discard(self.arena)


class Peer:
    """Another process with an arena. Its liveness file stays open here, so `is_dead` works even after the file's name was removed."""

    __slots__ = ("__weakref__", "_fd")

    def __init__(self, descriptor: int) -> None:
        """Use `find_peer`."""
        self._fd = descriptor
        weakref.finalize(self, os.close, descriptor)

    def is_dead(self) -> bool:
        """Whether the process is dead, which shows in its lock being gone. A dead process reads nothing any more: a process that ends loses
        its memory before its locks."""
        lock = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        # F_GETLK only asks. Taking the lock would make a sweep, or another process that asks, believe that the peer lives.
        kind: int = _FLOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_GETLK, lock))[0]
        return kind == fcntl.F_UNLCK


_peers: weakref.WeakValueDictionary[bytes, Peer] = weakref.WeakValueDictionary()


def find_peer(arena: bytes) -> Peer | None:
    """The process that owns this arena, if its liveness file shows that it is alive. None if the arena belongs to this process, or its
    liveness file is missing, belongs to another user, or is not locked."""
    if len(arena) != ARENA_ID_BYTES or arena in OWN_ARENAS:
        return None
    peer = _peers.get(arena)
    if peer is None:
        peer = _open_peer(arena)
        if peer is None:
            return None
        _peers[arena] = peer
    return None if peer.is_dead() else peer


def _open_peer(arena: bytes) -> Peer | None:
    """The process of an arena, by the arena's liveness file; None if this user has no such file here."""
    path = MOUNT / liveness_name(arena).removeprefix("/")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
        os.close(descriptor)
        return None
    return Peer(descriptor)


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
        if bytes.fromhex(arena) not in OWN_ARENAS:
            dead += _bury_arena(arena, kinds) if "live" in kinds else _bury_segments(arena, kinds)
    return dead


def _arenas(deadline: float) -> dict[str, list[str]]:
    """The arenas with files on the mount: name in hex -> the ending of each file, "live" or the number of a segment. deadline: the time
    (time.monotonic()) after which the list may be left incomplete."""
    endings: dict[str, list[str]] = {}
    try:
        with os.scandir(MOUNT) as entries:
            for entry in entries:
                match = _NAME.fullmatch(entry.name)
                if match is not None:
                    arena, ending = match.groups()
                    endings.setdefault(arena, []).append(ending)
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
