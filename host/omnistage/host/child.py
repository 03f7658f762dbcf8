"""A child process from its start to its end: a server of a stack, a rank of a model, a process that decodes, a player of sound.

`ChildProcess` starts a program and waits for its end, on a thread or on an event loop. `ConnectedChild` has a socket to the program;
whichever of the two ends first, the other reads the end of the data. The program of a `ModuleChild` calls `read_start` first: then the
kernel kills it with its parent, even if it hangs.

The client imports this module in programs of other people, so it needs the standard library alone. Such a program may fork: the child of
the fork closes what belongs to the processes of its parent, which would otherwise not notice that the parent has ended."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, ClassVar
from weakref import WeakSet

if TYPE_CHECKING:
    import asyncio

PR_SET_PDEATHSIG = 1
PIECE_BYTES = 1 << 16
"""The most bytes that are read at a time. A packet has no more."""

MAX_LINE_BYTES = 1 << 20

LOOK_S = 1.0
"""Seconds between two looks at a program that was killed."""

SIGNALS = {number.value: number.name for number in signal.Signals}

_no_fork = threading.RLock()
"""While this lock is held no fork begins: its child would not know a process that is just being started, and hold its socket open."""


def describe_end(status: int, word: str = "status") -> str:
    """The end of a process in words, such as "signal SIGKILL" or "status 1". status: as ChildProcess.wait returns it. word: for a status
    that is no signal."""
    return f"signal {SIGNALS.get(-status, -status)}" if status < 0 else f"{word} {status}"


class ChildProcess:
    """A running program, in a session of its own: Ctrl-C in the terminal reaches only this process, which then decides.

    end_fd: a descriptor that can be read once the program has ended. Any thread may wait for the end. Call `close` in every case."""

    _open: ClassVar[WeakSet[ChildProcess]] = WeakSet()

    def __init__(
        self,
        command: Sequence[str],
        *,
        fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        output: int | None = subprocess.DEVNULL,
        errors: int | IO[bytes] | None = None,
    ) -> None:
        """command: the program and its arguments. fds: further descriptors that it inherits. environment: all its variables; None: those of
        this process. stdin, output, errors: its standard streams as for subprocess.Popen; None: that of this process. Raises OSError."""
        with _no_fork, ExitStack() as undo:
            self._process = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=output,
                stderr=errors,
                bufsize=0,
                pass_fds=fds,
                env=environment,
                start_new_session=True,
            )
            undo.callback(self._process.wait)
            undo.callback(self._process.kill)
            self.end_fd = os.pidfd_open(self._process.pid)
            undo.pop_all()
            self._open.add(self)
        self._status: int | None = None  # as `wait` returns it
        self._ending: asyncio.Future[None] | None = None  # done at the end; None: no task waits for it

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def stdin(self) -> IO[bytes]:
        """The pipe to its standard input, if it was started with one."""
        assert self._process.stdin is not None
        return self._process.stdin

    def wait(self, limit_s: float | None = None) -> int | None:
        """Wait for the end, at most limit_s; None: for as long as it takes. Returns the exit status, or the negative number of the signal
        that ended it; None: it still runs. A signal handler may call this in the middle of any other call, so it waits for no lock: Popen's
        own wait has one."""
        if self._status is None and can_read(self.end_fd, limit_s) and self._status is None:
            try:
                end = os.waitid(os.P_PIDFD, self.end_fd, os.WEXITED | os.WNOWAIT)
                self._status = 0 if end is None else end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
            except ChildProcessError:  # Somebody else has waited for it, perhaps the kernel; then Popen calls the status 0 too.
                self._status = 0
            self._process.poll()  # Frees its entry among the processes, unless an interrupted call is just doing that.
        return self._status

    async def wait_on_loop(self) -> int:
        """Wait for the end on an event loop, always the same one; several tasks may wait. Returns as `wait`."""
        import asyncio  # Imported here: a process that decodes does without it.

        while (status := self.wait(0)) is None:
            if self._ending is None:
                loop = asyncio.get_running_loop()
                self._ending = loop.create_future()
                loop.add_reader(self.end_fd, self._note_end)
            await asyncio.shield(self._ending)
        return status

    def _note_end(self) -> None:
        """Called by the event loop at the end; wakes the tasks that wait."""
        if self._ending is not None and not self._ending.done():
            self._ending.get_loop().remove_reader(self.end_fd)
            self._ending.set_result(None)

    def terminate(self) -> None:
        """Send SIGTERM, if it still runs."""
        self._process.terminate()

    def kill(self) -> None:
        """If the program still runs, send SIGKILL to it and to all of its session."""
        if self.wait(0) is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the program if it still runs, wait for its end, and close what this process has of it. A second call does nothing."""
        if self in self._open:
            self.kill()
            while self.wait(LOOK_S) is None:  # A signal handler may close the descriptor in the middle of a look.
                pass
            self._note_end()
            self.leave()

    def leave(self) -> None:
        """Close what this process has of the program, which goes on by itself. Nothing else may be called afterwards."""
        self._open.discard(self)
        if self._status is None:
            self._status = self._process.returncode = 0  # Without a status Python would warn that it still runs.
        end_fd, self.end_fd = self.end_fd, -1
        if end_fd >= 0:
            os.close(end_fd)
        if self._process.stdin is not None:
            self._process.stdin.close()

    @classmethod
    def leave_all_to_parent(cls) -> None:
        """In a forked child: close its copies of what belongs to the processes of the parent."""
        _no_fork.release()
        for child in list(cls._open):
            child.leave()


os.register_at_fork(before=_no_fork.acquire, after_in_parent=_no_fork.release, after_in_child=ChildProcess.leave_all_to_parent)


class ConnectedChild(ChildProcess):
    """A program that has a socket to this process. channel: this end of it, which gives the end of the data when the program has ended."""

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        kind: socket.SocketKind = socket.SOCK_STREAM,
        *,
        fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        output: int | None = subprocess.DEVNULL,
        errors: int | IO[bytes] | None = None,
    ) -> None:
        """command: makes the command line from the descriptor of the program's end of the socket. kind: of the socket. The other arguments
        are those of ChildProcess. Raises OSError."""
        with _no_fork, ExitStack() as undo:
            self.channel, theirs = socket.socketpair(type=kind)
            undo.enter_context(self.channel)
            with theirs:
                their_fd = theirs.fileno()
                super().__init__(command(their_fd), fds=(their_fd, *fds), environment=environment, output=output, errors=errors)
            undo.pop_all()

    def lines(self) -> Iterator[bytes]:
        """Yields each line that the program writes, without its end, until the program ends or a line has more than MAX_LINE_BYTES; what
        comes after the last line break is dropped. Blocks."""
        data = b""
        with suppress(ConnectionResetError):  # It ended without reading what was sent to it.
            while len(data) <= MAX_LINE_BYTES and (piece := self.channel.recv(PIECE_BYTES)):
                *lines, data = (data + piece).split(b"\n")
                yield from lines

    async def first_line(self) -> bytes:
        """The first line that the program writes, on an event loop; without a line break at its end if the program has ended before, or if
        the line has more than MAX_LINE_BYTES."""
        import asyncio

        self.channel.setblocking(False)
        data = b""
        loop = asyncio.get_running_loop()
        with suppress(ConnectionResetError):  # As in `lines`.
            while not data.endswith(b"\n") and len(data) <= MAX_LINE_BYTES and (piece := await loop.sock_recv(self.channel, PIECE_BYTES)):
                data += piece
        return data

    def disconnect(self) -> None:
        """End the connection: both sides read its end now. Waits for nothing, and takes no lock: any thread may call it."""
        with suppress(OSError):  # It is closed already.
            self.channel.shutdown(socket.SHUT_RDWR)

    def leave(self) -> None:
        super().leave()
        self.channel.close()


class ModuleChild(ConnectedChild):
    """A process of `python -m MODULE DESCRIPTOR PARENT WORDS`, whose program calls `read_start` first. The kernel kills it when the thread
    ends that made this."""

    def __init__(
        self, module: str, words: Sequence[str] = (), kind: socket.SocketKind = socket.SOCK_STREAM, *, environment: Mapping[str, str]
    ) -> None:
        super().__init__(lambda fd: [sys.executable, "-P", "-m", module, str(fd), str(os.getpid()), *words], kind, environment=environment)


def read_start() -> tuple[int, list[str]]:
    """In the program of a ModuleChild: from now on it dies with its parent. Returns the descriptor of its socket, and its words."""
    descriptor, parent, *words = sys.argv[1:]
    die_with_parent(int(parent))
    return int(descriptor), words


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, or the thread of it that started this process. parent: its process id; if it
    has ended already, this process exits."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def count_mapped(pid: int | str) -> int:
    """Bytes that a process has mapped, as its bound RLIMIT_DATA counts them. pid: `self` for this process. Raises OSError if it has
    ended."""
    with Path(f"/proc/{pid}/status").open(encoding="utf-8") as file:
        return next((int(line.split()[1]) * 1024 for line in file if line.startswith("VmData:")), 0)


def can_read(fd: int, limit_s: float | None) -> bool:
    """Wait until a descriptor can be read, at most limit_s; None: for as long as it takes. Returns whether it can."""
    poller = select.poll()  # `select` refuses descriptors above 1023.
    poller.register(fd, select.POLLIN)
    return any(events & select.POLLIN for _, events in poller.poll(None if limit_s is None else 1000 * max(limit_s, 0.0)))
