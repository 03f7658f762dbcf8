"""One server process of a stack: started, awaited until it serves, started again, and stopped."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from omnistage.client.errors import StackError

LOG_LINES = 12
STOP_MARGIN_S = 5.0


class Child:
    """A process of ours.

    name: for humans, such as talker-1. address: where it is to listen; port 0 becomes, with the first start, a port that it keeps.
    metrics_address: the same, without that. log: the file that gets its output; None: this process's stderr. environment: all variables
    that it gets; None: those of this process. fds: file descriptors that it inherits besides those of its own start.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        address: str,
        metrics_address: str,
        log: Path | None,
        environment: Mapping[str, str] | None = None,
        fds: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.address = address
        self._command = [sys.executable, "-m", module, *arguments, "--metrics-address", metrics_address]
        self._log = log
        self._environment = environment
        self._fds = tuple(fds)
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    async def start(self, lifeline_fd: int) -> None:
        """Start it and wait until it serves; the one before has ended. Raises StackError with its last words if it ends before, and if it
        cannot be started at all."""
        try:
            line = await self._ready_line(lifeline_fd)
        except OSError as error:
            raise StackError(f"{self.name} cannot be started: {error}") from error
        ready = json.loads(line) if line.endswith(b"\n") else {}
        if "address" not in ready:
            raise await self._died_at_start(ready.get("error", ""))
        self.address = str(ready["address"])

    async def _ready_line(self, lifeline_fd: int) -> bytes:
        """Start it; what it says of itself when it serves or knows that it cannot. Empty: it ended. Raises OSError."""
        with ExitStack() as ends:
            ready_read, ready_write = os.pipe()
            writer = ends.enter_context(os.fdopen(ready_write, "wb"))
            reader = asyncio.StreamReader()
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(ready_read, "rb")
            )
            ends.callback(transport.close)
            await self._spawn(ready_write, lifeline_fd)
            writer.close()  # So that its end is the end of the pipe.
            return await reader.readline()

    async def _spawn(self, ready_fd: int, lifeline_fd: int) -> None:
        output = sys.stderr.fileno() if self._log is None else os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                "--address",
                self.address,
                "--ready-fd",
                str(ready_fd),
                "--lifeline-fd",
                str(lifeline_fd),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._environment,
                pass_fds=(ready_fd, lifeline_fd, *self._fds),
                start_new_session=True,  # a Ctrl-C in the terminal reaches the launcher only, which then drains in order
            )
        finally:
            if self._log is not None:
                os.close(output)

    async def _died_at_start(self, reason: str) -> StackError:
        """reason: what it said of it, empty for a process that could not."""
        code = await self.wait()
        hint = f"Its whole log is {self._log}." if self._log else "Its output is above."
        if reason:
            return StackError(f"{self.name} cannot start: {reason}", hint=hint)
        error = StackError(f"{self.name} ended with {describe_exit(code)} before it was ready", hint=hint)
        error.log = self.last_lines()
        return error

    def last_lines(self) -> str:
        """The end of its log; empty if the log goes elsewhere."""
        if self._log is None:
            return ""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-LOG_LINES:])

    async def wait(self) -> int:
        """Wait for its end and return the exit code; negative: the signal that ended it."""
        if self._process is None:
            return 0
        return await self._process.wait()

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, wait for the drain, and SIGKILL if that takes longer than the grace and a margin."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s + STOP_MARGIN_S):
                await process.wait()
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        """SIGKILL, if it is there, and wait for its end."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


def describe_exit(code: int) -> str:
    """An exit code in words."""
    return f"code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
