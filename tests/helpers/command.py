"""The command, run to its end: forked where that is the same as a Python of its own."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from helpers.forkserver import Forked, fork_server
from helpers.processes import Started

STARTS = ("omnistage.cli",)
"""What it runs: `make test-near` reads it."""
TIMEOUT_S = 110.0


def omnistage(
    *words: str | bytes | Path, text: str | bytes = "", folder: Path | None = None, timeout_s: float = TIMEOUT_S, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `omnistage` with these words. text: its standard input. folder: in which it runs, ours by default. variables: more than ours.

    Raises subprocess.TimeoutExpired; the process has ended then, too."""
    command = ["omnistage", *map(os.fsdecode, words)]
    environment = {**os.environ, **variables}
    forking = fork_server(STARTS)
    with ExitStack() as stack:
        given, output, errors = (stack.enter_context(_file(name)) for name in ("input", "output", "errors"))
        given.write(text.encode() if isinstance(text, str) else text)
        given.seek(0)
        streams = (given, output, errors)
        process: Forked | Started[bytes]
        if forking.can_fork(environment):
            numbers = {number: file.fileno() for number, file in enumerate(streams)}
            process = forking.fork(STARTS[0], command[1:], environment, numbers, folder=folder)
        else:
            started = [sys.executable, "-m", "omnistage.cli", *command[1:]]
            process = Started(started, stdin=given, stdout=output, stderr=errors, env=environment, cwd=folder)
        with process:
            process.wait(timeout_s)
        return subprocess.CompletedProcess(command, process.wait(), _text(output), _text(errors))


def _file(name: str) -> IO[bytes]:
    return os.fdopen(os.memfd_create(name), "w+b", buffering=0)


def _text(file: IO[bytes]) -> str:
    """What was written, with the ends of lines as text has them."""
    file.seek(0)
    return io.TextIOWrapper(io.BytesIO(file.read()), encoding="utf-8").read()
