"""A process that has imported what a program imports, and forks it: that takes a tenth of the time of a Python of its own.

    test --(module, words, variables, descriptors)--> fork server --fork--> the program --> how it ended --> test

What comes out runs the same module with the same words as `python -m` would; what is spared are the imports, which are most of
what a toy server or a short command ever computes. The environment decides whether a program can be forked: one with other variables than
ours, which Python and its libraries read when they start, gets a Python of its own. So does a family of processes, which are found by
the variables that they started with.
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
from pathlib import Path
from typing import Any

from helpers.processes import FORKED, MARK

ROOT = Path(__file__).resolve().parents[2]
STARTS = ()
"""Nothing by itself: `helpers/servers.py` and `helpers/command.py` say what they start."""
OURS = re.compile(rf"(?!{MARK})(OMNISTAGE|PYTEST)_.*|PYTHONPATH|TERM|COLUMNS|LINES|NO_COLOR")
"""Variables that are read when a program runs, or are where its modules were found, which does not change."""
BEGUN = dict(os.environ)
"""The variables of all tests, before any of them changed some."""
END_S = 10.0


class Forked:
    """A process that the fork server started, for whoever would have started it: as subprocess.Popen."""

    def __init__(self, pid: int, ended: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = ended

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

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.kill()
        self.wait()

    def _read(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._ended], [], [], timeout_s)[0]:
            with os.fdopen(self._ended) as told:
                ended = json.loads(told.read())
            self.returncode = ended["code"]
            FORKED.cpu_s += ended["cpu_s"]
        return self.returncode


class ForkServer:
    """The process, and what to tell it. It ends with the process that started it. programs: packages that `python -m` runs."""

    def __init__(self, programs: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "helpers.forkserver", str(theirs.fileno()), *programs]
            environment = {**BEGUN, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "tests"), BEGUN.get("PYTHONPATH")]))}
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        atexit.register(self.close)

    def can_fork(self, variables: Mapping[str, str]) -> bool:
        """Whether a program with these variables would be the same as with a Python of its own."""
        return _fixed(variables) == _fixed(BEGUN)

    def fork(
        self,
        module: str,
        words: Sequence[str],
        variables: Mapping[str, str],
        descriptors: Mapping[int, int],
        *,
        folder: Path | None = None,
        terminal: int | None = None,
    ) -> Forked:
        """`python -m MODULE WORDS`. descriptors: which of ours it finds at these numbers; the first three it has in any case. folder: in
        which it runs, ours by default. terminal: a descriptor of the one that becomes its own, as that of a person who types it."""
        ended, tell = os.pipe()
        asked = {
            "module": module,
            "words": list(words),
            "variables": dict(variables),
            "numbers": list(descriptors),
            "folder": str(folder or Path.cwd()),
            "terminal": terminal is not None,
        }
        # Longer than a packet may be.
        content = os.memfd_create("request")
        os.pwrite(content, json.dumps(asked).encode(), 0)
        with self._lock:
            sent = [tell, content, *descriptors.values(), *([] if terminal is None else [terminal])]
            socket.send_fds(self._ours, [b"fork"], sent)
            answer = self._ours.recv(64)
        os.close(tell)
        os.close(content)
        if not answer:
            raise RuntimeError("the fork server has ended")
        FORKED.count += 1
        return Forked(int(answer), ended)

    def close(self) -> None:
        self._ours.close()
        self._process.wait(END_S)


_servers: dict[tuple[int, Sequence[str]], ForkServer] = {}
"""By process, for a forked one must not use that of its parent, and by what it can start."""


def fork_server(programs: Sequence[str]) -> ForkServer:
    """The fork server of this process for these programs."""
    key = (os.getpid(), programs)
    if key not in _servers:
        _servers[key] = ForkServer(programs)
    return _servers[key]


def _fixed(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if not OURS.fullmatch(name)}


# In the fork server --------------------------------------------------------------------------------------------------------------------


def serve(connection: socket.socket) -> None:
    """Fork until nobody asks any more, and tell of each child how it ended."""
    children: dict[int, int] = {}
    # A child that ends interrupts the wait: through this pipe, for a signal that comes just before would be missed.
    ends, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    asked = True
    while asked:
        readable, _, _ = select.select([connection.fileno(), ends], [], [])
        if ends in readable:
            os.read(ends, 4096)
            _tell_ended(children)
        if connection.fileno() in readable:
            message, descriptors, _, _ = socket.recv_fds(connection, 16, 16)
            asked = bool(message)
            if asked:
                _fork(connection, descriptors, children, (ends, woken))


def _tell_ended(children: dict[int, int]) -> None:
    while children:
        pid, status, used = os.wait4(-1, os.WNOHANG)
        if not pid:
            return
        with os.fdopen(children.pop(pid), "w") as told:
            json.dump({"code": os.waitstatus_to_exitcode(status), "cpu_s": used.ru_utime + used.ru_stime}, told)


def _fork(connection: socket.socket, descriptors: list[int], children: dict[int, int], own: tuple[int, int]) -> None:
    tell, content, *given = descriptors
    asked = json.loads(os.pread(content, os.fstat(content).st_size, 0))
    os.close(content)
    _import_for(asked["words"])
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "what a thread holds would be held for ever"
    pid = os.fork()
    if pid == 0:
        for descriptor in (connection.detach(), tell, *own, *children.values()):
            os.close(descriptor)
        _become(asked, given)
    for descriptor in given:
        os.close(descriptor)
    children[pid] = tell
    connection.send(str(pid).encode())


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


def _become(asked: Mapping[str, Any], given: Sequence[int]) -> None:
    """The program. Does not return."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    numbers = asked["numbers"]
    # Out of the way first: a number that is wanted may be that of another one now.
    safe = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, max([2, *numbers]) + 1) for descriptor in given]
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
