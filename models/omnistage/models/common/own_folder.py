"""Folders that go with the process that made them. Those of a process that was killed go when the next one makes some in the same place.

The owner holds a lock on a file in its folder for as long as the folder is its own. The kernel gives the lock back when the owner ends, by
whatever end, so a lock that can be taken belongs to nobody. A folder that is kept on purpose has no such file, and nobody sweeps it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

PREFIX = "omnistage-"
UNNAMED = ".omnistage-new-"
"""Of a folder without a lock as yet."""
LOCK = ".owner"
NEWBORN_S = 60.0
"""One that has had no lock for so long was left by who was killed in the middle."""


class OwnFolder:
    """A new folder, until `remove` or `keep`, or to the end of a `with`. Raises OSError if there is no place for it."""

    def __init__(self, purpose: str, parent: Path | None = None) -> None:
        """purpose: a part of its name. parent: in which it is; None: where temporary files are."""
        parent = parent or Path(tempfile.gettempdir())
        sweep(parent)
        unnamed = Path(tempfile.mkdtemp(prefix=UNNAMED, dir=parent))
        # Locked before it has its name: a sweep never finds the file of a living owner unlocked.
        self._lock = os.open(unnamed / LOCK, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = unnamed.rename(parent / f"{PREFIX}{purpose}-{unnamed.name.removeprefix(UNNAMED)}")

    def remove(self) -> None:
        """Nobody needs it any more. What is no longer there, as moved to its place, is not missed."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._release()

    def keep(self) -> None:
        """It stays: a person has been told to look into it, or it becomes what it was made for."""
        (self.path / LOCK).unlink(missing_ok=True)
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()

    def _release(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def sweep(parent: Path) -> None:
    """Remove the folders whose owners were killed; only one's own, only folders, and never through a link."""
    for folder, _ in _own(parent, PREFIX):
        try:
            lock = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            continue  # kept on purpose, or gone by now
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            pass  # its owner lives, or nothing can be locked there
        finally:
            os.close(lock)
    for folder, changed_at in _own(parent, UNNAMED):
        if time.time() - changed_at > NEWBORN_S:
            shutil.rmtree(folder, ignore_errors=True)


def _own(parent: Path, prefix: str) -> Iterator[tuple[Path, float]]:
    """With the time of their last change."""
    for folder in parent.glob(f"{prefix}*"):
        try:
            found = folder.lstat()
        except OSError:
            continue  # gone by now
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
            yield folder, found.st_mtime
