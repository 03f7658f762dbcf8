"""Commands that set-up runs, above all pip, with errors that say what the user can do. It uses the standard library only, like all of
set-up."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HASHED = ("--require-hashes", "--no-deps", "--only-binary=:all:")
"""Options of pip by which it installs only what a list names, and only files whose hashes stand there."""


class SetupError(Exception):
    """The set-up cannot go on; the text says what the user can do."""


class CommandError(SetupError):
    """A command failed; `output` is everything that it printed."""

    def __init__(self, command: list[str], output: str) -> None:
        self.output = output
        super().__init__(f"{' '.join(command)} failed:\n{self.tail()}")

    def tail(self) -> str:
        """The last lines of the output, which have the reason."""
        return "\n".join(self.output.strip().splitlines()[-15:])


def run(command: list[str], folder: Path | None = None, **variables: str) -> str:
    """Run a command to its end and return its output. folder: where it runs; None: here. variables: added to the environment. Raises
    CommandError if it fails."""
    environment = {**os.environ, **variables}
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, check=False)
    if done.returncode:
        raise CommandError(command, done.stdout)
    return done.stdout


def pip(python: str, *arguments: str) -> None:
    """Install with pip. Raises CommandError if that fails, and SetupError with one line if a file has another hash than its list names."""
    try:
        run([python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", *arguments])
    except CommandError as error:
        if "DO NOT MATCH THE HASHES" not in error.output:
            raise
        names = ", ".join(re.findall(r"^ +(\S+==\S+) from ", error.output, re.MULTILINE))
        raise SetupError(
            f"{names}: the file that pip's sources gave is not the one whose SHA-256 stands in requirements/. Nothing of it was installed. "
            "Find out where it comes from; a mirror may have changed it, or someone on the way."
        ) from error


def say(text: str) -> None:
    """Print one line of output."""
    print(f"setup: {text}", flush=True)


@contextmanager
def step(name: str) -> Iterator[None]:
    """Print one line for one step: its name at the beginning of this block, its duration at the end."""
    print(f"setup: {name} ...", end="", flush=True)
    start = time.monotonic()
    try:
        yield
    except SetupError:
        print(" failed", flush=True)
        raise
    print(f" {time.monotonic() - start:.0f} s", flush=True)
