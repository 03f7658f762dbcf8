"""The command, run to its end: forked where that is the same as a Python of its own."""

from __future__ import annotations

import io
import os
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from helpers.program import Program, start
from helpers.surroundings import usual_variables

STARTS = ("omnistage.cli",)
"""The program that it runs, which a fork server imports before."""
TIMEOUT_S = 110.0


def omnistage(
    *words: str | bytes | Path,
    text: str | bytes = "",
    variables: Mapping[str, str] | None = None,
    folder: Path | None = None,
    timeout_s: float = TIMEOUT_S,
) -> subprocess.CompletedProcess[str]:
    """Run `omnistage` with these words. text: its standard input. variables: more than ours. folder: in which it runs, ours by default.

    Raises subprocess.TimeoutExpired; the process has ended then, too."""
    command = ["omnistage", *map(os.fsdecode, words)]
    with ExitStack() as stack:
        given, output, errors = (stack.enter_context(_file(name)) for name in ("input", "output", "errors"))
        given.write(text.encode() if isinstance(text, str) else text)
        given.seek(0)
        streams = (given.fileno(), output.fileno(), errors.fileno())
        program = Program("omnistage.cli", command[1:], {**usual_variables(), **(variables or {})}, streams, folder=folder)
        with start(program, STARTS) as process:
            code = process.wait(timeout_s)
        return subprocess.CompletedProcess(command, code, _text(output), _text(errors))


def _file(name: str) -> IO[bytes]:
    return os.fdopen(os.memfd_create(name), "w+b", buffering=0)


def _text(file: IO[bytes]) -> str:
    """The text that was written to the file, with the ends of lines as text has them."""
    file.seek(0)
    return io.TextIOWrapper(io.BytesIO(file.read()), encoding="utf-8").read()
