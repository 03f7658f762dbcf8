"""Which processes a test started, however deep, waiting for their end without polling, and a machine that has other things to do."""

from __future__ import annotations

import os
import resource
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import AnyStr

MARK = "OMNISTAGE_TEST_MARK"


@dataclass
class ForkedUsage:
    """The usage of processes that another process forks for this one; the kernel does not report them to this one. cpu_s: of those that
    have ended."""

    count: int = 0
    cpu_s: float = 0.0


FORKED = ForkedUsage()


class ProcessFamily:
    """All processes that have the mark in their environment: children inherit it. Give `environment` to the first of them."""

    def __init__(self) -> None:
        self.mark = secrets.token_hex(8)

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, MARK: self.mark}

    def pids(self) -> list[int]:
        """Those that are alive, without this process; one that ended but was not waited for is not alive."""
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal() and int(folder.name) != os.getpid():
                with suppress(OSError):  # It has ended, or is another user's.
                    if f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes():
                        found.append(int(folder.name))
        return found

    def wait_ended(self, timeout_s: float = 30.0) -> list[int]:
        """Wait until none is left; returns those that are left after the time limit."""
        deadline = time.monotonic() + timeout_s
        while pids := self.pids():
            for pid in pids:
                if not wait_end(pid, deadline - time.monotonic()):
                    return self.pids()
        return []

    def refused(self, program: str, *words: str, environment: Mapping[str, str] | None = None) -> tuple[str, str]:
        """The one line on standard error with which a Python program ends that cannot do what it is told, and what it printed."""
        done = subprocess.run(
            [sys.executable, "-c", program, *words],
            capture_output=True,
            text=True,
            timeout=60,
            env={**self.environment, **(environment or {})},
        )
        assert done.returncode == 1, done.stderr
        (line,) = done.stderr.splitlines()
        return line, done.stdout


class StartedProcess(subprocess.Popen[AnyStr]):
    """A process that ends with a test that fails; by itself `with` would wait for its end, for ever."""

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self.kill()
        super().__exit__(kind, value, trace)


def wait_end(pid: int, timeout_s: float) -> bool:
    """Wait for the end of any process; False if it is still alive after the time limit."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], max(timeout_s, 0.0))[0])
    finally:
        os.close(fd)


def open_files(pid: int | str = "self") -> set[tuple[str, str]]:
    """Number and target of each descriptor of a process, this one by default. A test asks which ones of its own process are new: what
    earlier tests left may be closed at any time."""
    descriptors = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # The process has just closed it, as this one has that of the listing.
            descriptors.add((path.name, str(path.readlink())))
    return descriptors


LOOPS_PER_CORE = 4


@contextmanager
def busy_cores() -> Iterator[None]:
    """Processes that want all there is of every core: four to a core, so that whoever else wants it gets a fifth of it or less."""
    loops: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(LOOPS_PER_CORE * (os.cpu_count() or 1)):
            loops.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@contextmanager
def few_descriptors(left: int) -> Iterator[None]:
    """This process can open so many files more. The limit is one of their numbers, and lower ones may be free: these are taken first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(int(path.name) for path in Path("/proc/self/fd").iterdir()) + 1 + left, hard))
        with suppress(OSError):
            while True:
                held.append(os.dup(2))
        for _ in range(left):
            os.close(held.pop())
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
