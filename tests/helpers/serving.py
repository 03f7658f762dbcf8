"""`omnistage serve` as a process of a test, and what it says on standard error."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from helpers.processes import ProcessFamily, StartedProcess, wait_end
from omnistage.client.connection import Replica

TIME = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ ")
"""Before what happens while it serves."""

END_S = 60.0
"""It ends sooner, or hangs."""


class ServeProcess(StartedProcess[str]):
    """It listens at a port of its own if no word says where. through: a command that runs the command that follows it."""

    def __init__(self, *words: str, through: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> None:
        place = () if "--address" in words else ("--address", "127.0.0.1:0")
        command = [*through, sys.executable, "-m", "omnistage.cli", "serve", *words, *place]
        super().__init__(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **(environment or {})})

    def line(self) -> str:
        """The next line, without the time that it may have."""
        assert self.stderr is not None
        return TIME.sub("", self.stderr.readline())

    def report(self, start: str) -> str:
        """The rest of the next line that begins so."""
        for line in iter(self.line, ""):
            if line.startswith(start):
                return line.removeprefix(start).strip()
        raise AssertionError(f"it ended without {start!r}")

    def address(self) -> str:
        """Where it serves, once it does."""
        return self.report("serving on ").split()[0]


@contextmanager
def serving(
    family: ProcessFamily, *words: str, through: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[ServeProcess]:
    """The process while a test runs. Unless the test has waited for its end, it ends on SIGTERM then; it leaves no process."""
    with ServeProcess(*words, through=through, environment=environment) as server:
        yield server
        if server.returncode is None:
            server.terminate()
            assert server.wait(END_S) == 0
    assert family.pids() == []


def pids_of(module: str, family: ProcessFamily) -> list[int]:
    """The processes of a stack that run this module."""
    return [pid for pid in family.pids() if module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]


def pid_of(module: str, family: ProcessFamily) -> int:
    """The first of these processes."""
    return pids_of(module, family)[0]


def take_over(replica: Replica, taken: ExitStack) -> None:
    """Kill it and listen at its address before it is back, as only a process of the same user can."""
    os.kill(replica.pid, signal.SIGKILL)
    assert wait_end(replica.pid, 30)
    host, _, port = replica.address.rpartition(":")
    taken.enter_context(socket.create_server((host, int(port)), reuse_port=True))
