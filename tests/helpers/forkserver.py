"""The process that forks programs for tests: `python -m helpers.forkserver DESCRIPTOR PROGRAM...`. `helpers/program.py` asks it."""

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
import signal
import socket
import sys
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

BEGUN = dict(os.environ)


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
            answer = _fork(connection, descriptors)
        connection.send(json.dumps(answer).encode())


def _fork(connection: socket.socket, descriptors: list[int]) -> dict[str, Any]:
    content, *given = descriptors
    asked = json.loads(os.pread(content, os.fstat(content).st_size, 0))
    os.close(content)
    _import_for(asked["words"])
    threads = len(list(Path("/proc/self/task").iterdir()))
    pid = os.fork() if threads == 1 else -1
    if pid == 0:
        os.close(connection.detach())
        _become(asked, given)
    for descriptor in given:
        os.close(descriptor)
    return {"pid": pid} if pid > 0 else {"error": f"it has {threads} threads, and what they hold a child would hold for ever"}


def _import_for(words: Sequence[str]) -> None:
    """Imports once what a model of the family needs."""
    if "--family" not in words:
        return
    from omnistage.models.registry import FAMILIES

    named = {word for before, word in itertools.pairwise(words) if before == "--family"} & FAMILIES.keys()
    for name in named:
        for entry in FAMILIES[name].models.values():
            importlib.import_module(entry.loader.partition(":")[0])
    if named:
        gc.freeze()  # No child looks through all of this again.


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
