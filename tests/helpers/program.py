"""Programs that tests start: forked by a process that has imported what they import, where that is the same as a Python of their own.

    test --(module, words, variables, descriptors)--> fork server --fork--> the program

What comes out runs the same module with the same words as `python -m` would, in a tenth of the time: imports are most of what a toy server
or a short command ever computes. `helpers/surroundings.py` says when it is the same. Benchmarks and chaos start Pythons of their own by the
same function.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers import forkserver, surroundings
from helpers.processes import FORKED, StartedProcess

SEEDS = 2
"""Fork servers of servers, in turns: what one of them forks has the same hashes, and that two replicas differ by those must be seen."""
END_S = 10.0


@dataclass(frozen=True)
class Program:
    """A program to run: `python -m MODULE WORDS`. streams: descriptors of ours that become its first three. passed: further ones, which
    keep their numbers. folder: in which it runs, ours by default. terminal: a descriptor of the terminal that becomes its own, as that of a
    person who types it. imports: modules that its fork server imports for this and later programs."""

    module: str
    words: Sequence[str]
    variables: Mapping[str, str]
    streams: tuple[int, int, int]
    passed: Sequence[int] = ()
    folder: Path | None = None
    terminal: int | None = None
    imports: Sequence[str] = ()


class ForkServerLost(Exception):
    """The fork server cannot start this program, or has ended; the text says why."""


class ForkedProcess:
    """One that the fork server started, for whoever would have started it: with the part of subprocess.Popen that tests use. As there its
    number is no other process's until somebody has waited for its end."""

    def __init__(self, pid: int, server: ForkServer) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server
        self._end = os.pidfd_open(pid)
        self._ended = select.poll()
        self._ended.register(self._end, select.POLLIN)
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        return self._read(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        code = self._read(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"forked process {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> ForkedProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.kill()
        self.wait()

    def _read(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and self._ended.poll(None if timeout_s is None else timeout_s * 1000):
            with self._lock:  # Two threads may wait for it.
                if self.returncode is None:
                    self.returncode = self._server.reap(self.pid)
                    os.close(self._end)
        return self.returncode


class ForkServer:
    """A process of `helpers/forkserver.py`, and what to tell it. connection: to it. process: the same if this process started it; it ends
    with this one then. lost: nothing more can be asked of it."""

    def __init__(self, connection: socket.socket, process: subprocess.Popen[bytes] | None) -> None:
        self.lost = False
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._ours = connection
        self._process = process
        atexit.register(self.close)

    def fork(self, program: Program) -> ForkedProcess:
        """Raises ForkServerLost."""
        asked = {
            "module": program.module,
            "words": list(program.words),
            "imports": list(program.imports),
            "variables": dict(program.variables),
            "folder": str(program.folder or Path.cwd()),
            "passed": list(program.passed),
            "terminal": program.terminal is not None,
        }
        terminal = [] if program.terminal is None else [program.terminal]
        content = os.memfd_create("request")  # Longer than a packet may be.
        try:
            os.pwrite(content, json.dumps(asked).encode(), 0)
            answer = self._ask({}, [content, *program.streams, *program.passed, *terminal])
        finally:
            os.close(content)
        FORKED.count += 1
        return ForkedProcess(answer["pid"], self)

    def reap(self, pid: int) -> int:
        """The exit code of one that has ended. Raises ForkServerLost."""
        ended = self._ask({"reap": pid}, [])
        FORKED.cpu_s += ended["cpu_s"]
        return int(ended["code"])

    def share(self, programs: Sequence[str], turn: int) -> ForkServer:
        """The server for these programs that all processes share which ask this one. Raises ForkServerLost."""
        return connect(self._ask({"share": programs, "turn": turn}, [])["path"])

    def close(self) -> None:
        self._ours.close()
        if self._process is not None:
            self._process.wait(END_S)

    def _ask(self, message: Mapping[str, Any], descriptors: Sequence[int]) -> dict[str, Any]:
        with self._lock:
            number = next(self._numbers)
            try:
                socket.send_fds(self._ours, [json.dumps({**message, "number": number}).encode()], descriptors)
                answer = self._receive()
                # The time of a test was over between an earlier question and its answer: that answer is nobody's any more.
                while answer.get("number", number) != number:
                    answer = self._receive()
            except OSError as error:
                answer = {"error": str(error)}
        if "error" in answer:
            self.lost = True
            raise ForkServerLost(answer["error"])
        return answer

    def _receive(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._ours.recv(4096) or b'{"error": "it has ended"}')
        return answer


def connect(path: str) -> ForkServer:
    """The fork server that listens at a path. Raises OSError if none does."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return ForkServer(connection, None)


def begin(programs: Sequence[str], variables: Mapping[str, str], path: str = "") -> ForkServer:
    """Start a fork server of this process. path: where others find it; empty: nowhere."""
    search_path = os.pathsep.join(filter(None, [surroundings.TESTS, variables.get("PYTHONPATH")]))
    return ForkServer(*forkserver.start_server(programs, path, {**variables, "PYTHONPATH": search_path}))


_servers: dict[tuple[int, Sequence[str], int], ForkServer] = {}
"""By process, for a forked one must not use those of its parent, by what they can start, and by number."""
_turns = itertools.cycle(range(SEEDS))
_lock = threading.Lock()


def _server(key: tuple[int, Sequence[str], int], variables: Mapping[str, str]) -> ForkServer:
    """The fork server of a key of `_servers`: the shared one of this run; if there is none or it was lost, one of this process."""
    if key not in _servers and (path := surroundings.shared_path()):
        with suppress(OSError, ForkServerLost):
            root = connect(path)
            try:
                _servers[key] = root.share(key[1], key[2])
            finally:
                root.close()
    if key not in _servers or _servers[key].lost:
        _servers[key] = begin(key[1], variables)
    return _servers[key]


def start(program: Program, starts: Sequence[str], under: Sequence[str] = ()) -> ForkedProcess | StartedProcess[bytes]:
    """Start a program, forked where that is the same as a Python of its own. starts: the programs of which this is one, which one fork
    server has. under: a command that runs it."""
    begun = surroundings.begun()
    if not under and begun is not None and surroundings.are_usual(program.variables):
        with _lock:
            server = _server((os.getpid(), starts, next(_turns) if len(starts) > 1 else 0), begun)
        try:
            return server.fork(program)
        except ForkServerLost:
            pass  # A Python of its own says what is wrong, if it is the program.
    return _start_python(program, under)


def _start_python(program: Program, under: Sequence[str]) -> StartedProcess[bytes]:
    stdin, stdout, stderr = program.streams
    passed = list(program.passed)
    command = [*under, sys.executable, "-m", program.module, *program.words]
    if program.terminal is not None:
        if stdin != program.terminal:  # setsid takes its standard input for the terminal
            take = "import os, sys; os.dup2(int(sys.argv[1]), 0); os.execvp(sys.argv[2], sys.argv[2:])"
            command = [sys.executable, "-c", take, str(stdin), *command]
            passed, stdin = [*passed, stdin], program.terminal
        command = ["setsid", "--ctty", *command]
    return StartedProcess(command, stdin=stdin, stdout=stdout, stderr=stderr, pass_fds=passed, env=program.variables, cwd=program.folder)
