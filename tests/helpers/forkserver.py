"""The process that forks programs for tests: `python -m helpers.forkserver DESCRIPTORS PROGRAM...`. `helpers/program.py` asks it.

The workers of one run share such processes, so that torch and the models are imported once a run. The process that starts the workers has a
fork server without programs, which starts the shared ones when a worker asks for the first time:

    pytest --starts--> fork server --starts--> fork server of some programs  <--fork, reap-- workers
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import io
import itertools
import json
import os
import pkgutil
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NoReturn, cast

BEGUN = dict(os.environ)


class Server:
    """Forks programs for whoever is connected, and tells how they ended. connection: of the process that started this one; this one ends
    with it. listener: takes further processes; None: nobody else is served."""

    def __init__(self, connection: socket.socket, listener: socket.socket | None) -> None:
        self._connection = connection
        self._listener = listener
        self._open = selectors.DefaultSelector()
        self._shared = dict[str, tuple[str, socket.socket, subprocess.Popen[bytes]]]()
        self._numbers = itertools.count()
        self._ended = dict[int, dict[str, Any]]()

    def run(self) -> None:
        """Answer one message after the other until the process that started this one closes its connection."""
        self._open.register(self._connection, selectors.EVENT_READ)
        if self._listener is not None:
            self._open.register(self._listener, selectors.EVENT_READ)
        while self._connection.fileno() >= 0:
            for key, _ in self._open.select():
                if key.fileobj is self._listener:
                    self._open.register(self._listener.accept()[0], selectors.EVENT_READ)
                else:
                    self._answer(cast("socket.socket", key.fileobj))
        for _, connection, process in self._shared.values():
            connection.close()
            process.kill()  # It may be in the middle of imports.
            process.wait()

    def _answer(self, connection: socket.socket) -> None:
        try:
            message, descriptors, _, _ = socket.recv_fds(connection, 1024, 16)
        except ConnectionResetError:  # A killed process had asked, and did not wait.
            message = b""
        if not message:
            self._open.unregister(connection)
            connection.close()
            return
        asked, given = json.loads(message), descriptors[1:]
        for content in descriptors[:1]:
            asked |= json.loads(os.pread(content, os.fstat(content).st_size, 0))
            os.close(content)
        try:
            answer = self._result(asked)
        except Exception as error:  # The programs of the other workers go on.
            answer = {"error": repr(error)}
        if answer.get("pid") == 0:
            self._leave()
            _become(asked, given)
        for descriptor in given:
            os.close(descriptor)
        with suppress(ConnectionError):  # It has just been killed.
            connection.send(json.dumps({**answer, "number": asked["number"]}).encode())

    def _result(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """The answer; {"pid": 0} in a forked process."""
        if "share" in asked:
            return {"path": self._share(asked["share"], asked["turn"])}
        if "reap" in asked:
            return self._reap(asked["reap"])
        _import_once(asked["imports"])
        threads = len(list(Path("/proc/self/task").iterdir()))
        if threads > 1:
            raise RuntimeError(f"it has {threads} threads, and what they hold a child would hold for ever")
        pid = os.fork()
        self._ended.pop(pid, None)
        return {"pid": pid}

    def _reap(self, pid: int) -> dict[str, Any]:
        """How a process has ended. A caller that was interrupted before the answer asks again."""
        if pid not in self._ended:
            _, status, used = os.wait4(pid, 0)
            self._ended[pid] = {"code": os.waitstatus_to_exitcode(status), "cpu_s": used.ru_utime + used.ru_stime}
        return self._ended[pid]

    def _leave(self) -> None:
        """Close in a forked process what belongs to this server."""
        for key in list(self._open.get_map().values()):
            os.close(cast("socket.socket", key.fileobj).detach())
        self._open.close()

    def _share(self, programs: Sequence[str], turn: int) -> str:
        """The path of the socket of a server of its own for these programs, the same for all that ask."""
        assert self._listener is not None
        key = " ".join([*programs, str(turn)])
        if key not in self._shared or self._shared[key][2].poll() is not None:
            path = f"{self._listener.getsockname()}{next(self._numbers)}"
            connection, process = start_server(programs, path, dict(os.environ))
            self._shared[key] = (path, connection, process)
        return self._shared[key][0]


def start_server(programs: Sequence[str], path: str, variables: Mapping[str, str]) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start a fork server that listens at a path, or at none if that is empty; returns the connection with which it ends, and it."""
    with ExitStack() as stack:
        connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        passed = [stack.enter_context(theirs)]
        if path:
            passed.append(stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)))
            passed[1].bind(path)
            passed[1].listen()
        numbers = [one.fileno() for one in passed]
        command = [sys.executable, "-m", "helpers.forkserver", ",".join(map(str, numbers)), *programs]
        return connection, subprocess.Popen(command, pass_fds=numbers, env=variables)


def _import_once(modules: Sequence[str]) -> None:
    """Import what the program would import, unless an earlier one had it imported."""
    if missing := [name for name in modules if name not in sys.modules]:
        for name in missing:
            importlib.import_module(name)
        gc.freeze()  # No child looks through all of this again.


def _become(asked: Mapping[str, Any], given: Sequence[int]) -> NoReturn:
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
    # Variables that the imports have set here, they would set there.
    by_imports = {name: value for name, value in os.environ.items() if BEGUN.get(name) != value}
    os.environ.clear()
    os.environ.update({**by_imports, **asked["variables"]})
    os.chdir(asked["folder"])
    sys.path[0] = asked["folder"]
    sys.argv = [asked["module"], *asked["words"]]
    runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)
    sys.exit()


def _open_streams() -> None:
    """As Python does when it starts: a terminal is written to line by line, and errors are in any case."""
    for number, name, mode in ((0, "stdin", "rb"), (1, "stdout", "wb"), (2, "stderr", "wb")):
        before = getattr(sys, name)
        unbuffered = bool(os.environ.get("PYTHONUNBUFFERED")) and number > 0
        file = open(number, mode, 0 if unbuffered else -1, closefd=False)  # noqa: SIM115, it stays open
        by_line = number == 2 or os.isatty(number)
        stream = io.TextIOWrapper(file, before.encoding, before.errors, line_buffering=by_line, write_through=unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _import(name: str) -> None:
    """A package that is a program, and all its modules. Each child runs the program for the first time."""
    importlib.import_module(f"{name}.__main__")
    for one in pkgutil.walk_packages(sys.modules[name].__path__, f"{name}."):
        importlib.import_module(one.name)
    del sys.modules[f"{name}.__main__"]


def main() -> None:
    numbers, *programs = sys.argv[1:]
    for name in programs:
        _import(name)
    gc.freeze()
    # Ctrl-C is for the tests, which end this.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection, *listener = (socket.socket(fileno=int(number)) for number in numbers.split(","))
    Server(connection, listener[0] if listener else None).run()


if __name__ == "__main__":
    main()
