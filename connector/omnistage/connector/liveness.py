"""How a process shows that its arena is alive: a record lock on a file, which the kernel drops with the process.

A process id would not do (containers number alike, ids are reused), nor would flock (a forked child keeps it).
"""

import fcntl
import os

from omnistage.connector.shm import create_file, liveness_name, unlink

OWN: set[bytes] = set()
"""Arenas of this process. A sweep must not open their files: closing any descriptor of a file drops the process's lock on it."""


class Liveness:
    """The locked file of one arena, from creation to `close`."""

    def __init__(self, arena: bytes) -> None:
        """Create and lock it. Raises OSError."""
        self._arena = arena
        self._fd = create_file(liveness_name(arena))
        OWN.add(arena)
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(self._fd).st_nlink == 0:
                raise FileNotFoundError("the liveness file was removed while it was made")
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Remove the file and drop the lock."""
        unlink(liveness_name(self._arena))
        os.close(self._fd)
        OWN.discard(self._arena)
