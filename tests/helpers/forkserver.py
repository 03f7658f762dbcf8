"""A process that has imported what a program imports, and forks it: that takes a tenth of the time of a Python of its own.

    test --(module, words, variables, descriptors)--> fork server --fork--> the program

What comes out runs the same module with the same words as `python -m` would; what is spared are the imports, which are most of
what a toy server or a short command ever computes. Only tests fork, for which this is a plugin of pytest. The environment decides whether a
program can be: one with other variables than the run of tests, which Python and its libraries read when they start, gets a Python of its
own. So does a family of processes, which are found by the variables that they started with.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib
import json
import os
import pkgutil
import re
import runpy
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest

from helpers.processes import FORKED, MARK, Started

ROOT = Path(__file__).resolve().parents[2]
STARTS = ()
"""Nothing by itself: `helpers/servers.py` and `helpers/command.py` say what they run."""
OURS = re.compile(rf"(?!{MARK})(OMNISTAGE|PYTEST)_.*|PYTHONPATH|TERM|COLUMNS|LINES|NO_COLOR")
"""Variables that are read when a program runs, or are where its modules were found, which does not change."""
PYTESTS = "PYTEST_CURRENT_TEST"
END_S = 10.0


class ForkedProcess:
    """One that the fork server started, for whoever would have started it: with the part of subprocess.Popen that tests use. As there its
    number is no other process's until somebody has waited for its end."""

    def __init__(self, pid: int, server: ForkServer) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server
        self._end = os.pidfd_open(pid)
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
        # Two threads may wait for it.
        if self.returncode is None and select.select([self._end], [], [], timeout_s)[0]:
            with self._lock:
                if self.returncode is None:
                    self.returncode = self._server.reap(self.pid)
                    os.close(self._end)
        return self.returncode


@dataclass(frozen=True)
class Program:
    """What is to run: `python -m MODULE WORDS`. streams: descriptors of ours that become its first three. passed: further ones, which
    keep their numbers. terminal: a descriptor of the terminal that becomes its own, as that of a person who types it."""

    module: str
    words: Sequence[str]
    variables: Mapping[str, str]
    streams: tuple[int, int, int]
    passed: Sequence[int] = ()
    folder: Path | None = None
    terminal: int | None = None


Process = ForkedProcess | Started[bytes]


class ForkServer:
    """The process, and what to tell it. It ends with the process that started it. programs: packages that `python -m` runs."""

    def __init__(self, programs: Sequence[str], variables: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "helpers.forkserver", str(theirs.fileno()), *programs]
            path = os.pathsep.join(filter(None, [str(ROOT / "tests"), variables.get("PYTHONPATH")]))
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env={**variables, "PYTHONPATH": path})
        atexit.register(self.close)

    def fork(self, program: Program) -> ForkedProcess:
        asked = {
            "module": program.module,
            "words": list(program.words),
            "variables": dict(program.variables),
            "folder": str(program.folder or Path.cwd()),
            "passed": list(program.passed),
            "terminal": program.terminal is not None,
        }
        # Longer than a packet may be.
        content = os.memfd_create("request")
        os.pwrite(content, json.dumps(asked).encode(), 0)
        terminal = [] if program.terminal is None else [program.terminal]
        pid = self._ask({"fork": True}, [content, *program.streams, *program.passed, *terminal])["pid"]
        os.close(content)
        FORKED.count += 1
        return ForkedProcess(pid, self)

    def reap(self, pid: int) -> int:
        """The exit code of one that has ended."""
        ended = self._ask({"reap": pid}, [])
        FORKED.cpu_s += ended["cpu_s"]
        return int(ended["code"])

    def _ask(self, message: Mapping[str, Any], descriptors: Sequence[int]) -> dict[str, Any]:
        with self._lock:
            socket.send_fds(self._ours, [json.dumps(message).encode()], descriptors)
            answer = self._ours.recv(1024)
        if not answer:
            raise RuntimeError("the fork server has ended")
        told: dict[str, Any] = json.loads(answer)
        return told

    def close(self) -> None:
        self._ours.close()
        self._process.wait(END_S)


@dataclass
class _State:
    """Of this process. begun: its variables when the run of tests began; none where nothing is forked. set_since: those that libraries have
    set since then. servers: by process, for a forked one must not use those of its parent, and by what they can start."""

    begun: Mapping[str, str] | None = None
    set_since: Mapping[str, str] = field(default_factory=dict)
    servers: dict[tuple[int, Sequence[str]], ForkServer] = field(default_factory=dict)


_state = _State()


def pytest_configure() -> None:
    """From now on programs are forked. Where libraries may have threads of their own none is: a fork server has one thread."""
    _state.begun = dict(os.environ) if os.environ.get("OMP_NUM_THREADS") == "1" else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    # Between two tests none of them has changed a variable: what is other than at first, libraries and models have set in this process.
    _state.set_since = {name: value for name, value in os.environ.items() if name != PYTESTS and (_state.begun or {}).get(name) != value}


def variables() -> dict[str, str]:
    """Those of a program that a test starts: those of the run, and what the test has set. Not what libraries have set in this process, for
    themselves."""
    if _state.begun is None:
        return dict(os.environ)
    ours = {name: value for name, value in os.environ.items() if _state.set_since.get(name) != value}
    return {**{name: value for name, value in _state.begun.items() if name in os.environ}, **ours}


def start(program: Program, starts: Sequence[str], under: Sequence[str] = ()) -> Process:
    """Start a program, forked where that is the same as a Python of its own. starts: the programs of which this is one, which one fork
    server has. under: a command that runs it."""
    if under or _state.begun is None or _fixed(program.variables) != _fixed(_state.begun):
        return _start_python(program, under)
    key = (os.getpid(), starts)
    if key not in _state.servers:
        _state.servers[key] = ForkServer(starts, _state.begun)
    return _state.servers[key].fork(program)


def _start_python(program: Program, under: Sequence[str]) -> Started[bytes]:
    stdin, stdout, stderr = program.streams
    passed = list(program.passed)
    command = [*under, sys.executable, "-m", program.module, *program.words]
    if program.terminal is not None:
        if stdin != program.terminal:  # setsid takes its standard input for the terminal
            take = "import os, sys; os.dup2(int(sys.argv[1]), 0); os.execvp(sys.argv[2], sys.argv[2:])"
            command = [sys.executable, "-c", take, str(stdin), *command]
            passed, stdin = [*passed, stdin], program.terminal
        command = ["setsid", "--ctty", *command]
    return Started(command, stdin=stdin, stdout=stdout, stderr=stderr, pass_fds=passed, env=program.variables, cwd=program.folder)


def _fixed(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if not OURS.fullmatch(name)}


# In the fork server --------------------------------------------------------------------------------------------------------------------


def serve(connection: socket.socket) -> None:
    """Fork, and tell of children how they ended, until nobody asks any more."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, 1024, 16)
        if not message:
            return
        asked = json.loads(message)
        if "reap" in asked:
            _, status, used = os.wait4(asked["reap"], 0)
            answer: dict[str, Any] = {"code": os.waitstatus_to_exitcode(status), "cpu_s": used.ru_utime + used.ru_stime}
        else:
            answer = {"pid": _fork(connection, descriptors)}
        connection.send(json.dumps(answer).encode())


def _fork(connection: socket.socket, descriptors: list[int]) -> int:
    content, *given = descriptors
    asked = json.loads(os.pread(content, os.fstat(content).st_size, 0))
    os.close(content)
    _import_for(asked["words"])
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "what a thread holds would be held for ever"
    pid = os.fork()
    if pid == 0:
        os.close(connection.detach())
        _become(asked, given)
    for descriptor in given:
        os.close(descriptor)
    return pid


def _import_for(words: Sequence[str]) -> None:
    """What a model of the family needs, once."""
    if "--family" not in words:
        return
    from omnistage.models.registry import FAMILIES

    family = FAMILIES.get(words[words.index("--family") + 1])
    for entry in family.models.values() if family else ():
        importlib.import_module(entry.loader.partition(":")[0])
    # No child looks through all of this again.
    gc.freeze()


def _become(asked: Mapping[str, Any], given: Sequence[int]) -> NoReturn:
    """The program, to its end."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    numbers = [0, 1, 2, *asked["passed"]]
    # Out of the way first: a number that is wanted may be that of another one now.
    safe = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, max(numbers) + 1) for descriptor in given]
    for descriptor in given:
        os.close(descriptor)
    for number, descriptor in zip(numbers, safe, strict=False):
        os.dup2(descriptor, number)
    if asked["terminal"]:
        os.setsid()
        fcntl.ioctl(safe[-1], termios.TIOCSCTTY, 0)
    for descriptor in safe:
        os.close(descriptor)
    _open_streams()
    os.environ.clear()
    os.environ.update(asked["variables"])
    os.chdir(asked["folder"])
    sys.argv = [asked["module"], *asked["words"]]
    runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)
    sys.exit()


def _open_streams() -> None:
    """As Python does when it starts: a terminal is written to line by line, and errors are in any case."""
    for number, name, mode, buffering in ((0, "stdin", "r", -1), (1, "stdout", "w", -1), (2, "stderr", "w", 1)):
        before = getattr(sys, name)
        stream = open(number, mode, buffering, before.encoding, before.errors, closefd=False)  # noqa: SIM115, it stays open
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _import(name: str) -> None:
    """A package that is a program, and all its modules. Each child runs the program for the first time."""
    importlib.import_module(f"{name}.__main__")
    for one in pkgutil.iter_modules(sys.modules[name].__path__):
        importlib.import_module(f"{name}.{one.name}")
    del sys.modules[f"{name}.__main__"]


def main() -> None:
    connection, *programs = sys.argv[1:]
    for name in programs:
        _import(name)
    gc.freeze()
    # Ctrl-C is for the tests, which end this.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(socket.socket(fileno=int(connection)))


if __name__ == "__main__":
    main()
