"""A file that is being written beside its place. One whose process was killed goes when the next one is made in the same folder.

The process holds a lock on it, which the kernel gives back by whatever end: a lock that can be taken belongs to nobody.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
import time
from contextlib import suppress
from pathlib import Path

PREFIX, SUFFIX = ".omnistage-", ".part"
NEWBORN_S = 60.0
"""A draft without its suffix may not be locked yet; one that has none for so long was left by who was killed in the middle."""

_NAME = re.compile(re.escape(PREFIX) + "[0-9a-f]{12}(" + re.escape(SUFFIX) + ")?")


class Draft:
    """A new empty file in `folder` at `path`, until `discard`. Raises OSError if there is no place for it."""

    def __init__(self, folder: Path, mode: int) -> None:
        sweep(folder)
        name = PREFIX + secrets.token_hex(6)
        unnamed, self.path = folder / name, folder / (name + SUFFIX)
        self._lock = os.open(unnamed, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        # Locked before it has its name: a sweep never finds the draft of a living process unlocked. Where locks cannot be, nobody sweeps.
        with suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        unnamed.rename(self.path)

    def discard(self) -> None:
        """Remove it, if it has not been moved to its place."""
        self.path.unlink(missing_ok=True)
        os.close(self._lock)


def sweep(folder: Path) -> None:
    """Remove the drafts of processes that were killed; only one's own, only files, and never through a link."""
    for path in folder.glob(f"{PREFIX}*"):
        if not _NAME.fullmatch(path.name):
            continue
        try:
            draft = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue  # somebody else's, or gone by now
        try:
            found = os.fstat(draft)
            is_young = not path.name.endswith(SUFFIX) and time.time() - found.st_mtime < NEWBORN_S
            if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not is_young:
                fcntl.flock(draft, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
        except OSError:
            pass  # its process lives, or another one sweeps too
        finally:
            os.close(draft)
