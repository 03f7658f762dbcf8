"""Shows that a process's arena is alive, by a record lock on a file, which the kernel drops when the process ends.

A process id would not do (containers use the same numbers, ids are reused), nor would flock (a forked child keeps it).
"""

import fcntl
import os
import secrets
import stat
import struct
import weakref

from omnistage.connector.locality import MOUNT
from omnistage.connector.shm import create_file, liveness_name, unlink

ARENA_ID_BYTES = 16

OWN: set[bytes] = set()
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
        OWN.add(self.arena)  # first, because a sweep may run in another thread
        try:
            self._fd = create_file(liveness_name(self.arena))
        except OSError:
            OWN.discard(self.arena)
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
        OWN.discard(self.arena)


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
    if len(arena) != ARENA_ID_BYTES or arena in OWN:
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
