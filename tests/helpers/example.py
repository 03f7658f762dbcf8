"""A built example in any language, which asks a router."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.examples import PROTOS

QUESTION = "Why is the sky blue?"
TIMEOUT_S = 110.0
"""Longest wait for an example, which itself gives up after 120 s."""


@dataclass(frozen=True, slots=True)
class Example:
    """A built example. command: runs it. folder: where it runs and writes answer.wav."""

    command: Sequence[str]
    folder: Path

    def start(self, address: str, *words: str) -> subprocess.Popen[str]:
        """Start the example. address: HOST:PORT of the router. words: further arguments after the question."""
        # Without these, some languages would send calls to this machine through a proxy that the environment names.
        environment = {**os.environ, "PROTOS": str(PROTOS), "no_proxy": "127.0.0.1,localhost", "NO_PROXY": "127.0.0.1,localhost"}
        command, pipe = [*self.command, address, QUESTION, *words], subprocess.PIPE
        return subprocess.Popen(command, cwd=self.folder, env=environment, text=True, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)

    def run(self, address: str, *words: str) -> tuple[int, str, str]:
        """Run the example to its end. Returns exit status, standard output, standard error."""
        with self.start(address, *words) as process:
            try:
                out, err = process.communicate(timeout=TIMEOUT_S)
            finally:
                process.kill()
        return process.returncode, out, err
