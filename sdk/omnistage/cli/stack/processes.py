"""One server process of a stack. `StackProcess` starts it, waits until it serves, and stops it. `keep` keeps it running: starts it again,
at the same address, when it has ended by itself, and kills it first if it no longer answers.

A call of native code that keeps Python's lock stops the whole process, with any watchdog in it: only another process can notice that. The
questions go over the socket on which the process said that it serves, and not by gRPC, whose threads would be awake for seconds after each
question."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from omnistage.cli.places import explain
from omnistage.cli.stack.layout import option_words
from omnistage.cli.stack.resources import Bounds, bound_text, memory_of_machine
from omnistage.client.errors import StackError
from omnistage.host.background import first_of
from omnistage.host.child import ConnectedChild, describe_end
from omnistage.host.watchdog import KernelThread, read_threads, uses_between

ANY_MEMORY = Bounds()

LOG_LINES = 12
STOP_MARGIN_S = 5.0


@dataclass(eq=False)
class StackProcess:
    """A server process of the stack.

    name: for people, such as talker-1. module, arguments: its command line, as `python -m MODULE ARGUMENTS`. address: HOST:PORT at which it
    listens; the first start replaces port 0 by a port that it keeps. metrics_address: HOST:PORT of its metrics, with the real port once it
    serves. log: the file that gets its output; None: this process's stderr. environment: all its variables; None: those of this process.
    fds: file descriptors that it inherits in addition to those of `start`. bounds: limits on its memory. connect: called at each start
    with this end of a socket for notes (host.notes), of which the process gets the other end; None: it takes no notes."""

    name: str
    module: str
    arguments: Sequence[str]
    address: str
    metrics_address: str
    log: Path | None
    environment: Mapping[str, str] | None = None
    fds: Sequence[int] = ()
    bounds: Bounds = ANY_MEMORY
    connect: Callable[[socket.socket], object] | None = None
    _memory_bytes: int | None = field(default=None, init=False)
    """Its bound on memory."""
    _process: ConnectedChild | None = field(default=None, init=False)
    _serves: bool = field(default=False, init=False)

    @property
    def serves(self) -> bool:
        """Whether the process has said that it serves, and has not ended since."""
        return self._serves and self._process is not None and self._process.wait(0) is None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    async def start(self, lifeline_fd: int, start_fd: int | None = None, words: Sequence[str] = ()) -> None:
        """Start the process, after an earlier one has ended, and wait until it serves. lifeline_fd: the reading end of the lifeline.
        start_fd: the reading end of a pipe; the end of the pipe is the sign for a router to go on. words: further arguments, for this start
        alone. Raises StackError if the process cannot be started, or is stopped or ends before it serves; then `log` has its last lines."""
        self._serves = False
        await self.kill()
        try:
            process = self._process = self._spawn(lifeline_fd, start_fd, words)
        except OSError as error:
            raise StackError(f"{self.name} cannot be started: {explain(error)}") from error
        self._memory_bytes = self.bounds.put_on(process.pid)
        line = await first_of(process.first_line(), wait_until_stopped(process.pid))
        if isinstance(line, str):
            await self.kill()
            raise StackError(f"{self.name} {line} and was killed")
        ready = json.loads(line) if line.endswith(b"\n") else {}
        if "address" not in ready:
            raise await self._died_at_start(ready.get("error", ""))
        self.address, self.metrics_address = str(ready["address"]), str(ready["metrics_address"])
        self._memory_bytes = self.bounds.put_on_serving(self.pid, memory_of_machine()) or self._memory_bytes
        self._serves = True

    def _spawn(self, lifeline_fd: int, start_fd: int | None, words: Sequence[str]) -> ConnectedChild:
        """Start the process, with its output in the log. The arguments are those of `start`. Raises OSError."""
        with ExitStack() as closing:
            inherited = {"lifeline_fd": lifeline_fd} | ({} if start_fd is None else {"start_fd": start_fd})
            if self.connect is not None:
                ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
                closing.enter_context(theirs)
                self.connect(ours)
                inherited["launcher_fd"] = theirs.fileno()

            def command(fd: int) -> list[str]:
                places = {"metrics_address": self.metrics_address, "address": self.address}
                options = {**places, **inherited, "ready_fd": fd, "liveness_fd": fd}
                return [sys.executable, "-m", self.module, *self.arguments, *words, *option_words(options)]

            log = sys.stderr if self.log is None else closing.enter_context(open_log(self.log))
            fds = (*inherited.values(), *self.fds)
            return ConnectedChild(command, fds=fds, environment=self.environment, output=log.fileno(), errors=log.fileno())

    async def _died_at_start(self, reason: str) -> StackError:
        """The error of a process that ended before it served. reason: the reason that the process itself gave; empty: it gave none."""
        code = await self.wait()
        hint = f"Its whole log is {self.log}." if self.log else "Its output is above."
        if reason:
            return StackError(f"{self.name} cannot start: {reason}", hint=hint)
        error = StackError(f"{self.name} ended with {self.end_text(code)} before it was ready", hint=hint)
        error.log = self.last_lines()
        return error

    def last_lines(self) -> str:
        """The last lines of the process's log; empty if it has no log."""
        if self.log is None:
            return ""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_LINES:])

    def end_text(self, code: int) -> str:
        """A text that says how the process ended. code: as `wait` returns it."""
        return describe_end(code, "code") + (bound_text(self._memory_bytes) if code == -signal.SIGABRT else "")

    async def wait(self) -> int:
        """Wait for its end and return the exit code; negative: the signal that ended it."""
        return 0 if self._process is None else await self._process.wait_on_loop()

    async def silence(self) -> str:
        """Wait until the process that serves answers no more; returns a text that says so."""
        assert self._process is not None
        return await wait_until_silent(self._process.channel, self.pid)

    async def stop(self, grace_s: float) -> None:
        """End the process by SIGTERM, and by SIGKILL if it then runs longer than grace_s and a margin. grace_s: seconds for its answers to
        finish; a process that does not serve yet has no answers, so it gets only the margin."""
        if self._process is not None:
            self._process.terminate()
            with suppress(TimeoutError):
                async with asyncio.timeout((grace_s if self._serves else 0.0) + STOP_MARGIN_S):
                    await self._process.wait_on_loop()
        await self.kill()

    async def kill(self) -> None:
        """Send SIGKILL, if the process runs, and wait for its end."""
        if self._process is not None:
            self._process.kill()
            await self._process.wait_on_loop()
            self._process.close()

    def kill_now(self) -> None:
        """Send SIGKILL, if the process runs."""
        if self._process is not None:
            self._process.kill()


def open_log(log: Path) -> IO[bytes]:
    """Open a log for writing. Its folder is made anew if it is gone: a pipeline may start days after the stack, when a cleaner of temporary
    folders has removed it."""
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")


FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0
HEALTHY_S = 30.0
"""If a process has served for this many seconds, the next pause before a restart is FIRST_BACKOFF_S."""

MAX_FAILED_STARTS = 5
"""After this many failed starts in a row a process is given up."""

RESTART_LIMIT_S = 900.0
"""Time limit of one restart; a process that is not ready then counts as hung, and is killed."""

Tell = Callable[[str, str], None]
"""Called with an event of a process, which is lost, ended, restarted, failed or given up, and a text that begins with the name of the
process."""


@asynccontextmanager
async def in_time(name: str, log_lines: Callable[[], str] = str) -> AsyncIterator[None]:
    """A context for a start that may take RESTART_LIMIT_S. Raises StackError if it takes longer. name: of what starts. log_lines: gives the
    log of the error."""
    try:
        async with asyncio.timeout(RESTART_LIMIT_S):
            yield
    except TimeoutError:
        error = StackError(f"{name} was not ready within {RESTART_LIMIT_S:g} s")
        error.log = log_lines()
        raise error from None


async def keep(child: StackProcess, lifeline_fd: int, tell: Tell) -> StackError:
    """Watch a child that serves, and start it again when it has ended, after pauses that grow. Returns only when it is given up, after
    MAX_FAILED_STARTS failures in a row, with the error of the last one. lifeline_fd: see `StackProcess.start`.

    If this is cancelled while a process is being started, `StackProcess.stop` can end that process.
    """
    clock = asyncio.get_running_loop().time
    backoff_s = FIRST_BACKOFF_S
    while True:
        serving_since = clock()
        report = await _loss(child)
        lost_at = clock()
        tell(*report)
        if lost_at - serving_since >= HEALTHY_S:
            backoff_s = FIRST_BACKOFF_S
        for failures in range(1, MAX_FAILED_STARTS + 1):
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
            try:
                async with in_time(child.name, child.last_lines):
                    await child.start(lifeline_fd)
                break
            except StackError as error:
                await child.kill()
                if failures == MAX_FAILED_STARTS:
                    return error
                tell("failed", error.message)
        tell("restarted", f"{child.name} (pid {child.pid}) after {clock() - lost_at:.1f} s")


async def _loss(child: StackProcess) -> tuple[str, str]:
    """Wait until a child has ended; kill it if it does not answer. Returns the event and the text for `tell`."""
    label = f"{child.name} (pid {child.pid})"
    end = await first_of(child.wait(), child.silence())
    if isinstance(end, str):
        await child.kill()
        return "lost", f"{label} {end} and was killed"
    if end:
        return "lost", f"{label} ended with {child.end_text(end)}"
    return "ended", f"{label} was told to, and let its sessions finish; it is started again"


PERIOD_S = 5.0
"""Seconds between two questions, and the time for an answer. All servers are asked at the same moments, so that this process wakes up
once."""

MAX_UNANSWERED = 6
"""After this many unanswered questions in a row the process counts as hung. Questions are counted and not seconds, so that a time in which
this process itself did not run counts as one question at most."""

MAX_EXCUSED = 24
"""After this many questions in a row that a starved process has not answered, further ones count."""

STARVED_SHARE = 0.5
"""A process of which a thread waits for a CPU for this part of the time, by the kernel's count, may be starved."""

SERVED_SHARE = 0.02
"""A process that runs for this part of the time is not starved: an answer takes less than that."""

_MAX_ANSWERS = 4096
"""Bytes read at a time: the answers of a slow process may come together."""


async def wait_until_silent(connection: socket.socket, pid: int) -> str:
    """Ask until the process at the other end has not answered MAX_UNANSWERED questions in a row; return a text that says so. At most
    MAX_EXCUSED questions, asked while the machine left no time to the process, do not count. connection: a socket that does not block."""
    loop = asyncio.get_running_loop()
    unanswered = excused = 0
    times = _ProcessTimes(pid)
    next_at = _moment_after(loop.time())
    while unanswered < MAX_UNANSWERED:
        await asyncio.sleep(next_at - loop.time())
        # If this process itself is late, the other one still gets at least half a period.
        next_at = _moment_after(loop.time() + PERIOD_S / 2)
        if await _answers(connection, next_at):
            unanswered = excused = 0
            times.forget()
        elif times.is_starved() and excused < MAX_EXCUSED:
            excused += 1
        else:
            unanswered += 1
    return f"did not answer for {(unanswered + excused) * PERIOD_S:g} s"


class _ProcessTimes:
    """The kernel's times of the threads of a process that does not answer, from one unanswered question to the next. Nothing is read while
    the process answers.

    The machine leaves a process no time if one of its threads could run, or waits for the disk or for memory that was swapped out, and the
    process as a whole hardly ran. If it ran, it could have answered, and hangs: a loop that never ends uses a CPU even on a full machine,
    although little of it. The pressure of the machine does not tell these two apart."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._threads: Mapping[int, KernelThread] = {}
        self._read_at_s = 0.0

    def forget(self) -> None:
        """Forget the last reading: the process has answered since."""
        self._threads = {}

    def is_starved(self) -> bool:
        """Whether the machine has left the process no time since the last call. False at the first call after `forget`, and if the times
        cannot be read."""
        before, before_s = self._threads, self._read_at_s
        try:
            self._threads, self._read_at_s = read_threads([self._pid]), time.monotonic()
        except OSError:  # No descriptor is left.
            self._threads = {}
        elapsed_s = self._read_at_s - before_s
        uses = uses_between(before, self._threads, elapsed_s).values()
        ran_s = sum(use.cpu_s for use in uses)
        waits = any(use.state == "D" or use.delay_s >= STARVED_SHARE * elapsed_s for use in uses)
        return waits and ran_s < SERVED_SHARE * elapsed_s


async def wait_until_stopped(pid: int) -> str:
    """Look at a process that cannot answer yet until it was stopped by a signal, and not continued, at MAX_UNANSWERED looks in a row;
    return a text that says so."""
    looks = 0
    while looks < MAX_UNANSWERED:
        await asyncio.sleep(PERIOD_S)
        looks = looks + 1 if _is_stopped(pid) else 0
    return f"was stopped by a signal for {MAX_UNANSWERED * PERIOD_S:g} s while it started"


def _is_stopped(pid: int) -> bool:
    try:
        # The letter of the state stands after the name of the process, which is in parentheses.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("T")
    except OSError:  # It has ended.
        return False


def _moment_after(time_s: float) -> float:
    """The next multiple of PERIOD_S by the clock of the loop."""
    return (time_s // PERIOD_S + 1) * PERIOD_S


async def _answers(connection: socket.socket, until_s: float) -> bool:
    """Ask, and return whether an answer comes before until_s; an answer to an earlier question counts as well."""
    loop = asyncio.get_running_loop()
    try:
        connection.send(b"?")
        async with asyncio.timeout_at(until_s):
            return bool(await loop.sock_recv(connection, _MAX_ANSWERS))
    except (OSError, TimeoutError):  # The socket was closed, or is full of questions that the process has not read.
        return False
