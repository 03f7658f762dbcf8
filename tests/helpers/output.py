"""The command by a Python of its own, what it says when it refuses, what it prints for scripts, and the files that it leaves."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from helpers.command import omnistage

COMMAND = (sys.executable, "-m", "omnistage.cli")


def refusal(*words: str | bytes | Path, code: int = 1, **options: Any) -> list[str]:
    """The lines on standard error of a command that ends with this code and prints nothing; without the line that names the request, which
    is the last one if a router was asked. options: of `omnistage`."""
    done = omnistage(*words, **options)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    *lines, last = done.stderr.splitlines()
    return lines if re.fullmatch(r"request: [0-9a-f]{32}", last) else [*lines, last]


def object_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The only line that a command with --json prints, if it goes well."""
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    result: dict[str, Any] = json.loads(line)
    return result


def names(folder: Path) -> list[str]:
    """The names of all that is in a folder."""
    return sorted(path.name for path in folder.iterdir())
