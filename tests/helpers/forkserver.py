"""A process that has imported what servers import, and forks them: that takes a tenth of the time of a Python of their own.

    test --(words, variables, three descriptors)--> fork server --fork--> a server --> how it ended --> test

The server that comes out runs the same module with the same words as `python -m` would; what is spared are the imports, which are most
of what a toy server ever computes. `environment` decides who can be forked: one with other variables than ours, which Python
and its libraries read when they start, gets a Python of its own. So does a family of processes, which are found by their variables.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from helpers.processes import FORKED

ROOT = Path(__file__).resolve().parents[2]
STARTS = ("omnistage.router", "omnistage.thinker", "omnistage.talker", "omnistage.code2wav", "omnistage.diffusion")
"""What it forks: `make test-near` reads it."""
OURS = ("OMNISTAGE_", "PYTEST_", "PYTHONPATH")
"""Variables of these names are read when a server runs, or are where its modules were found, which does not change."""
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
            raise subprocess.TimeoutExpired(f"forked server {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _read(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._ended], [], [], timeout_s)[0]:
            with os.fdopen(self._ended) as told:
                ended = json.loads(told.read())
            self.returncode = ended["code"]
            FORKED.cpu_s += ended["cpu_s"]
        return self.returncode


class ForkServer:
    """The process, and what to tell it. It ends with the process that started it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._variables = _fixed(os.environ)
        with theirs:
            command = [sys.executable, "-m", "helpers.forkserver", str(theirs.fileno())]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "tests"), os.environ.get("PYTHONPATH")]))}
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        atexit.register(self.close)

    def can_fork(self, environment: Mapping[str, str]) -> bool:
        """Whether one with these variables would be the same as with a Python of its own."""
        return _fixed(environment) == self._variables

    def fork(self, module: str, words: Sequence[str], environment: Mapping[str, str], ready: int, lifeline: int, log: int) -> Forked:
        """`python -m MODULE WORDS --ready-fd ... --lifeline-fd ...`. log: where it prints."""
        ended, tell = os.pipe()
        told = json.dumps({"module": module, "words": list(words), "variables": dict(environment), "folder": str(Path.cwd())})
        # Longer than a packet may be.
        content = os.memfd_create("request")
        os.pwrite(content, told.encode(), 0)
        with self._lock:
            socket.send_fds(self._ours, [b"fork"], [ready, lifeline, log, tell, content])
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


_servers: dict[int, ForkServer] = {}
"""By process, for a forked one must not use that of its parent."""


def start_server(
    module: str, words: Sequence[str], variables: Mapping[str, str], ready: int, lifeline: int, log: IO[bytes]
) -> Forked | subprocess.Popen[bytes]:
    """`python -m MODULE WORDS` with these variables and the two descriptors, forked where that is the same. log: where it prints."""
    if os.getpid() not in _servers:
        _servers[os.getpid()] = ForkServer()
    if _servers[os.getpid()].can_fork(variables):
        return _servers[os.getpid()].fork(module, words, variables, ready, lifeline, log.fileno())
    command = [sys.executable, "-m", module, *words, *_descriptors(ready, lifeline)]
    return subprocess.Popen(command, pass_fds=(ready, lifeline), stdout=log, stderr=log, env=variables)


def _descriptors(ready: int, lifeline: int) -> list[str]:
    return ["--ready-fd", str(ready), "--lifeline-fd", str(lifeline), "--log-format", "json"]


def _fixed(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if not name.startswith(OURS)}


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
            message, descriptors, _, _ = socket.recv_fds(connection, 16, 5)
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
    ready, lifeline, log, tell, content = descriptors
    asked = json.loads(os.pread(content, os.fstat(content).st_size, 0))
    os.close(content)
    _import_for(asked["words"])
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "what a thread holds would be held for ever"
    pid = os.fork()
    if pid == 0:
        for descriptor in (connection.detach(), tell, *own, *children.values()):
            os.close(descriptor)
        _become(asked, ready, lifeline, log)
    for descriptor in (ready, lifeline, log):
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


def _become(asked: Mapping[str, Any], ready: int, lifeline: int, log: int) -> None:
    """The server. Does not return."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.clear()
    os.environ.update(asked["variables"])
    os.chdir(asked["folder"])
    sys.argv = [asked["module"], *asked["words"], *_descriptors(ready, lifeline)]
    runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)


def main() -> None:
    from omnistage.host.memory import put_off_collection, tune_malloc
    from omnistage.host.structlog_import import import_structlog

    tune_malloc()
    put_off_collection()
    import_structlog()
    for module in STARTS:
        importlib.import_module(f"{module}.__main__")
        del sys.modules[f"{module}.__main__"]  # Each child runs it, for the first time.
    gc.freeze()
    # Ctrl-C is for the tests, which end this.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
