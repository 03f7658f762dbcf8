"""The folder for the output of a private stack. It goes with its owner; that of an owner that was killed goes when the next one is made.

The owner holds a lock on a file in its folder for as long as the folder is its own. The kernel gives the lock back when the owner ends, by
whatever end, so a lock that can be taken belongs to nobody. A folder that is kept on purpose has no such file, and nobody sweeps it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "omnistage-logs-"
LOCK = ".owner"


class LogFolder:
    """A new folder below the one for temporary files, until `remove` or `keep`. Raises OSError if there is no place for it."""

    def __init__(self) -> None:
        sweep(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        # Locked before it has its name: a sweep never finds the file of a living owner unlocked.
        unnamed = self.path / f"{LOCK}.new"
        self._lock = os.open(unnamed, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unnamed.rename(self.path / LOCK)

    def remove(self) -> None:
        """Nobody needs it any more."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._release()

    def keep(self) -> None:
        """It stays: a person has been told to look into it."""
        (self.path / LOCK).unlink(missing_ok=True)
        self._release()

    def _release(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def sweep(parent: Path) -> None:
    """Remove the folders whose owners were killed; only one's own, only folders, and never through a link."""
    for folder in parent.glob(f"{PREFIX}*"):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            lock = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            continue  # kept on purpose, or gone by now
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass  # its owner lives
        finally:
            os.close(lock)
