"""The stacks of this user that serve on this machine: a file for each, locked by its launcher for as long as that lives.

The kernel gives the lock back when the launcher ends, by whatever end: a file that can be locked belongs to nobody, and goes.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omnistage.cli.folders import state_folder
from omnistage.client.errors import NotAvailableError, RequestError

SUFFIX, UNNAMED = ".json", ".new"
NEWBORN_S = 60.0
"""A file without a name is locked and gets one within this time."""

LONGEST_S = 86400.0
"""Nobody waits longer for the end of a stack, whatever its grace."""


@dataclass(frozen=True, slots=True)
class Served:
    """One stack. address: HOST:PORT of its router. pid: of its launcher. pipeline: its name or file. log_folder: where the output of its
    processes goes; empty: to where its launcher was started from. grace_s: how long answers get at the end."""

    address: str
    pid: int
    pipeline: str
    log_folder: str
    grace_s: float


def folder() -> Path:
    """The folder of this user for what serves now, which nobody else may change. Raises NotAvailableError where somebody else may."""
    path = state_folder("run")
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise NotAvailableError(f"{path} is not a folder of yours alone", hint="Remove it, or set OMNISTAGE_STATE to another folder.")
    return path


def _boot() -> str:
    """Of this machine since it was started: the folder may be on a disk that several share, or have files of before."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@contextmanager
def registered(served: Served) -> Iterator[None]:
    """Others of this user find the stack meanwhile. Where there is no place for the file, nobody finds it, and it serves all the same."""
    try:
        path, lock = _locked(served)
    except (OSError, NotAvailableError):
        path, lock = None, -1
    try:
        yield
    finally:
        if path is not None:
            with suppress(OSError):
                path.unlink(missing_ok=True)
            os.close(lock)


def _locked(served: Served) -> tuple[Path, int]:
    """The file of a stack and a lock on it. Raises OSError, and what `folder` raises."""
    path = folder() / f"{_boot()}-{served.pid}{SUFFIX}"
    path.unlink(missing_ok=True)  # Of a launcher that had the same pid.
    unnamed = path.with_suffix(UNNAMED)
    lock = os.open(unnamed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        # Locked before it has its name: whoever finds it finds it locked.
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.write(lock, json.dumps(asdict(served)).encode())
        unnamed.rename(path)
    except OSError:
        unnamed.unlink(missing_ok=True)
        os.close(lock)
        raise
    return path, lock


def all_served() -> list[Served]:
    """Those that serve now, in the order of their addresses. Files of launchers that are gone are removed; what cannot be read, as from
    another version, is left out."""
    found = []
    for path in folder().glob(f"{_boot()}-*{UNNAMED}"):  # Of a launcher that was killed before it was registered.
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > NEWBORN_S:
                path.unlink()
    for path in folder().glob(f"{_boot()}-*{SUFFIX}"):
        with suppress(OSError), path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                path.unlink()
            except BlockingIOError:
                with suppress(ValueError, TypeError, KeyError):
                    found.append(_read(json.load(file)))
    return sorted(found, key=lambda served: served.address)


def _read(said: dict[str, Any]) -> Served:
    return Served(
        str(said["address"]), int(said["pid"]), str(said["pipeline"]), str(said.get("log_folder", "")), float(said.get("grace_s", 5.0))
    )


def chosen(stacks: list[Served], address: str | None) -> Served:
    """The one that is meant. Raises RequestError where that is none, or might be several."""
    if not stacks:
        raise RequestError("no stack of yours serves on this machine", hint="`omnistage serve --detach` starts one.")
    there = ", ".join(served.address for served in stacks)
    matching = [served for served in stacks if address in (None, served.address, served.address.rpartition(":")[2])]
    if not matching:
        raise RequestError(f"no stack of yours serves at {address}", hint=f"There are: {there}.")
    if len(matching) > 1:
        raise RequestError(f"several stacks of yours serve: {there}", hint="Name one, or --all.")
    return matching[0]


class StackEnd:
    """The end of a stack, from the signal to the last of its processes."""

    def __init__(self, served: Served) -> None:
        """Raises ProcessLookupError if it has ended already."""
        self._served = served
        self._pidfd = os.pidfd_open(served.pid)
        # Between the look at the file and this the pid may have become another process's.
        if served not in all_served():
            os.close(self._pidfd)
            raise ProcessLookupError(served.pid)

    def signal(self) -> None:
        """The first asks it to end when its answers have, the second to end now."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)

    def wait(self, limit_s: float) -> bool:
        """Whether it has ended; waits at most so long."""
        until = time.monotonic() + min(limit_s, LONGEST_S)
        while (left_s := until - time.monotonic()) > 0:
            if select.select([self._pidfd], [], [], left_s)[0]:
                return True
        return False

    def close(self) -> None:
        os.close(self._pidfd)
