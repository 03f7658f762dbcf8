"""Starts the toy stack that a recording asks, and makes the environment and the files of all processes of a recording."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
PIPELINES = ("toy", "toy-omni", "toy-picture", "toy-film")
START_LIMIT_S, END_LIMIT_S, MODULE_LIMIT_S = 120.0, 30.0, 600.0

VARIABLES = {
    "COLUMNS": "120",
    "LINES": "40",
    "NO_COLOR": "1",
    "TERM": "dumb",
    "TZ": "UTC",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "HF_HUB_OFFLINE": "1",
    "PIP_NO_INDEX": "1",
    "OMNISTAGE_TOKEN": "recording-token-of-32-characters",
}
"""Variables of all processes: nothing is fetched, and a text looks the same on all terminals."""


@dataclass(frozen=True, slots=True)
class Recording:
    """The surroundings of one recording. tree: the checkout whose program is recorded. folder: for all that it writes. router, gateway:
    HOST:PORT of the toy stack."""

    tree: Path
    folder: Path
    router: str
    gateway: str

    @property
    def files(self) -> Path:
        """The folder of the files that requests send."""
        return self.folder / "files"

    @property
    def places(self) -> dict[str, str]:
        """The names that replace folders and addresses in results."""
        folders = {str(self.folder): "<tmp>", str(self.tree): "<tree>", str(ROOT): "<tree>", sys.prefix: "<python>"}
        return {**folders, self.router: "<router>", self.gateway: "<gateway>"}

    def variables(self, home: Path) -> dict[str, str]:
        """The environment of a process, without anything of the shell that makes the recording."""
        project = tomllib.loads((self.tree / "pyproject.toml").read_text(encoding="utf-8"))
        folders = [str(self.tree / name) for name in project["tool"]["hatch"]["build"]["dev-mode-dirs"]]
        return {
            **VARIABLES,
            "PATH": os.pathsep.join((str(Path(sys.executable).parent), "/usr/bin", "/bin")),
            "PYTHONPATH": os.pathsep.join((*folders, str(ROOT))),
            "TMPDIR": str(self.folder),
            "HOME": str(home),
            "OMNISTAGE_CACHE": str(self.folder / "cache"),
            "OMNISTAGE_STATE": str(home / "state"),
            "OMNISTAGE_ROUTER": self.router,
        }

    def run_module(self, module: str) -> dict[str, Any]:
        """Run a module of this package beside the recorded tree; returns the object of JSON that it prints. Raises CalledProcessError,
        TimeoutExpired."""
        command, environment = [sys.executable, "-m", module, self.router], self.variables(self.folder / "home")
        output = subprocess.run(command, cwd=self.files, env=environment, stdout=subprocess.PIPE, timeout=MODULE_LIMIT_S, check=True).stdout
        results: dict[str, Any] = json.loads(output)
        return results


def read_table(name: str) -> Any:
    """The contents of a YAML file beside this one."""
    return yaml.safe_load(Path(__file__).with_name(name).read_text(encoding="utf-8"))


@contextmanager
def serve_toys(tree: Path, folder: Path) -> Iterator[Recording]:
    """A toy stack of this checkout, whose pipelines are all ready; it is ended with the block. Raises RuntimeError if it does not start."""
    recording = Recording(tree, folder, _free_address(), _free_address())
    recording.files.mkdir()
    for name, content in read_table("files.yaml").items():
        (recording.files / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    command = [sys.executable, "-m", "omnistage.cli", "serve", *PIPELINES, "--address", recording.router, "--http", recording.gateway]
    environment = recording.variables(folder / "stack")
    with (folder / "serve.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        _wait_until_ready(recording, process)
        yield recording
    finally:
        process.terminate()
        try:
            process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_address() -> str:
    """An address on loopback at which nobody listens now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{listener.getsockname()[1]}"


def _wait_until_ready(recording: Recording, process: subprocess.Popen[bytes]) -> None:
    """Wait until the gateway lists all pipelines as ready. Raises RuntimeError."""
    until = time.monotonic() + START_LIMIT_S
    while time.monotonic() < until and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://{recording.gateway}/v1/models", timeout=10) as response:
                if [model["state"] for model in json.load(response)["data"]] == ["ready"] * len(PIPELINES):
                    return
        except OSError:
            pass
        time.sleep(0.2)
    raise RuntimeError(f"the toy stack did not start:\n{(recording.folder / 'serve.log').read_text(encoding='utf-8', errors='replace')}")
