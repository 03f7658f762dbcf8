"""The disk of a machine, which its processes share: the place of fetched models, a lock on a file that one process at a time can hold, and
files and folders that are removed when their process ends. If the process is killed, the next process that makes such a file or folder in
the same place removes them.

The owner of a file or folder holds a lock while it lives: on the file, or on a file in the folder. The kernel frees a lock when its process
ends in any way, so a file that another process can lock belongs to nobody. Where files cannot be locked, the remains of a killed process
stay.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from omnistage.models.reports import ShowProgress


def cache_directory() -> Path:
    """The directory: `OMNISTAGE_CACHE`, else `omnistage` in the XDG cache directory. It may not exist yet. Raises OSError if this user has
    no home."""
    return named_directory("OMNISTAGE_CACHE", "XDG_CACHE_HOME", ".cache")


def named_directory(variable: str, xdg_variable: str, in_home: str) -> Path:
    """The directory that a variable names, else `omnistage` in the directory of an XDG variable, or in its usual place. in_home: that
    place in the user's home. Raises OSError if none of them says where, because this user has no home."""
    path_text, base = os.environ.get(variable), os.environ.get(xdg_variable)
    try:
        if path_text:
            return Path(path_text).expanduser()
        return (Path(base) if base else Path.home() / in_home) / "omnistage"
    except RuntimeError:  # In a container the user may be a bare number.
        reason = f"{path_text or 'this user'} has no home directory: set {variable} to a folder of yours"
        raise FileNotFoundError(errno.ENOENT, reason) from None


WAITING = "another process fetches; waiting"
LOOK_S = 0.5
"""Seconds between two looks at the other process's progress."""


@contextmanager
def hold_lock(path: Path, progress: ShowProgress, byte_counts: Callable[[], tuple[int, int | None]]) -> Iterator[None]:
    """Hold the lock on a file while the context is open; the file and its folder are made if they are missing. While another process holds
    it, wait and show that process's progress every LOOK_S. byte_counts: returns (number of bytes that the other process has fetched, number
    of all bytes, or None if that is not known).

    The wait has no limit, because the other process may fetch much; if that process ends, its lock is freed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        has_waited = False
        while not _try_lock(file):
            progress(WAITING, *byte_counts(), "bytes")
            has_waited = True
            time.sleep(LOOK_S)
        if has_waited:
            progress(WAITING, 1.0)
        yield


def _try_lock(file: TextIO) -> bool:
    """Lock the file if no other process holds it. Returns whether it is locked now."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


PREFIX = "omnistage-"
"""Beginning of a folder's name. `sweep` never removes such a folder without a file LOCK, because its owner kept it, or files cannot be
locked there."""
LOCK = ".owner"

NEW = ".omnistage-new-"
"""Beginning of the name of a file or folder that is not locked yet. It is locked first and renamed then, so everything with the final name
and a living owner is locked."""
NEWBORN_S = 60.0
"""A file or folder that still has its NEW name after this many seconds belongs to a killed process."""

_NEW = re.compile(re.escape(NEW) + "[0-9a-f]{12}")
_FILE = re.compile(r"\.omnistage-[0-9a-f]{12}\.part")
_FOLDER = re.compile(re.escape(PREFIX) + "[a-z]+-[0-9a-f]{12}")
"""The whole name must match, because other folders of the same user may begin alike."""


class OwnFile:
    """A new file at `path`; the process owns it until `remove` or `release`. is_locked: whether it could be locked. Raises OSError if it
    cannot be made. `_lock`: descriptor of the file; -1: closed."""

    def __init__(self, folder: Path, mode: int, *, name: str = "", content: bytes = b"") -> None:
        """mode: its permissions. name: its name, which replaces a file of that name; empty: a name that no other file has. content: written
        before the file gets its name."""
        sweep(folder)
        token = secrets.token_hex(6)
        new = folder / f"{NEW}{token}"
        self._lock = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            self.is_locked = _lock(self._lock)
            os.write(self._lock, content)
            suffix = "part" if self.is_locked else "unlocked"  # `sweep` never removes an unlocked one.
            self.path = new.rename(folder / (name or f".omnistage-{token}.{suffix}"))
        except BaseException:
            self.release()
            new.unlink(missing_ok=True)
            raise

    def remove(self) -> None:
        """Remove the file if it is still at `path`, and give up the lock."""
        try:
            self.path.unlink(missing_ok=True)
        finally:
            self.release()

    def release(self) -> None:
        """Give up the lock; the file stays."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


class OwnFolder:
    """A new folder at `path`; the process owns it until `remove` or `keep`, or the end of a `with`. Raises OSError if it cannot be made."""

    def __init__(self, purpose: str, parent: Path | None = None) -> None:
        """purpose: a word of its name, lower-case letters. parent: the folder to make it in; None: the folder for temporary files."""
        parent = parent or Path(tempfile.gettempdir())
        sweep(parent)
        token = secrets.token_hex(6)
        new = parent / f"{NEW}{token}"
        with ExitStack() as undo:
            new.mkdir(0o700)
            undo.callback(new.rmdir)
            self._lock = OwnFile(new, 0o600, name=LOCK)
            undo.callback(self._lock.remove)
            if not self._lock.is_locked:
                self._lock.remove()
            self.path = new.rename(parent / f"{PREFIX}{purpose}-{token}")
            undo.pop_all()

    def remove(self) -> None:
        """Remove the folder. It is no error if parts of it are missing because they were moved elsewhere."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()

    def keep(self) -> None:
        """Give up the folder without removing it, because a person is to look into it, or its content is complete."""
        (self.path / LOCK).unlink(missing_ok=True)
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()


def is_owned(file: int) -> bool:
    """Whether a living process holds the lock on this open file. Raises OSError if files cannot be locked here."""
    try:
        # A shared lock, so that another process that checks at the same time does not seem to be the owner.
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def sweep(parent: Path) -> None:
    """Remove what killed processes left in a folder. It removes only files and folders of this user, and follows no links."""
    for path in (*parent.glob(f"{PREFIX}*"), *parent.glob(f".{PREFIX}*")):
        try:
            if _is_abandoned(path):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
        except OSError:
            pass  # Another process removed it, or it cannot be opened or locked.


def _is_abandoned(path: Path) -> bool:
    """Whether a file or folder was made by this module, in a process that has ended. Raises OSError if that cannot be determined."""
    status = path.lstat()
    is_folder, is_new = stat.S_ISDIR(status.st_mode), _NEW.fullmatch(path.name) is not None
    is_ours = status.st_uid == os.geteuid() and (is_folder or stat.S_ISREG(status.st_mode))
    if not is_ours or not (is_new or (_FOLDER if is_folder else _FILE).fullmatch(path.name)):
        return False
    lock = path / LOCK if is_folder else path
    if is_new and time.time() - status.st_mtime < NEWBORN_S:
        return False
    if is_new and not lock.exists():
        return True
    file = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        return not is_owned(file)
    finally:
        os.close(file)


def _lock(file: int) -> bool:
    """Lock a new file. Returns whether it is locked; False: files cannot be locked here, as on some network disks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:
        return False
    return True
