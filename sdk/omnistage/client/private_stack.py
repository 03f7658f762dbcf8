"""A stack of one's own: router and stages as processes of this machine, started for one client and gone with it.

The processes are started and watched by `omnistage serve`. It reports the router's address on one pipe, and ends everything when another
pipe closes: that happens in `stop`, at the exit of this process, and when this process is killed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import TypedDict

from omnistage.client.errors import NotAvailableError, StackError

STOP_TIMEOUT_S = 20.0

LAUNCHER_NEEDS = ("typer", "rich")
"""Packages of the launcher that a client by itself does not need."""


class StackSettings(TypedDict, total=False):
    """Engine settings of a private stack. What is absent is the default of `omnistage serve`."""

    pipeline: str
    """Name or YAML file of the pipeline."""
    device: str | Mapping[str, str]
    """cpu, cuda:0 ... for all stages, or by stage: {"thinker": "cuda:0", "code2wav": "cpu"}."""
    dtype: str
    """auto, float32 or bfloat16."""
    replicas: Mapping[str, int]
    """Processes by stage: {"talker": 2}."""
    max_sessions: int
    """Answers at once per stage process."""
    threads: int
    """Compute threads per stage process."""
    inline_limit: int
    """Tensors of more bytes travel through shared memory."""
    start_timeout_s: float
    """Time limit for download, load and start, seconds (900)."""


@dataclass(frozen=True, slots=True)
class StackPlan:
    """What to start. Raises TypeError for settings that do not exist, NotAvailableError for those that this platform cannot serve yet."""

    settings: StackSettings = field(default_factory=lambda: StackSettings())
    model_path: str | PathLike[str] | None = None
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        unknown = sorted(set(self.settings) - set(StackSettings.__annotations__))
        if unknown:
            known = ("model_path", "tensor_parallel_size", *StackSettings.__annotations__)
            raise TypeError(f"unknown settings {', '.join(unknown)}; known: {', '.join(known)}")
        if self.tensor_parallel_size != 1:
            raise NotAvailableError(
                f"tensor_parallel_size={self.tensor_parallel_size}: one stage on several devices is not available on this platform yet",
                hint="Use tensor_parallel_size=1; several replicas of a stage serve more sessions (replicas={'talker': 2}).",
            )

    def command(self, ready_fd: int, lifeline_fd: int) -> list[str]:
        """The command line of the launcher."""
        settings = self.settings
        words = [sys.executable, "-m", "omnistage.cli", "serve", "--address", "127.0.0.1:0"]
        words += ["--ready-fd", str(ready_fd), "--lifeline-fd", str(lifeline_fd), "--client-share", "1"]
        if self.model_path is not None:
            words += ["--checkpoint", os.fspath(self.model_path)]
        device = settings.get("device", {})
        for word in [device] if isinstance(device, str) else [f"{stage}={name}" for stage, name in device.items()]:
            words += ["--device", word]
        for stage, count in settings.get("replicas", {}).items():
            words += ["--replicas", f"{stage}={count}"]
        for name in ("dtype", "max_sessions", "threads", "inline_limit"):
            if name in settings:
                words += [f"--{name.replace('_', '-')}", str(settings[name])]
        if "pipeline" in settings:
            words += ["--", settings["pipeline"]]
        return words


class PrivateStack:
    """The processes of one plan. Start it once; stop it as often as you like, from any thread."""

    def __init__(self, plan: StackPlan) -> None:
        self._plan = plan
        self._address = ""
        self._lock = threading.Lock()
        self._finalizer: weakref.finalize[..., PrivateStack] | None = None

    def start(self) -> str:
        """Start everything and return the router's address when it serves. Blocks. Raises StackError."""
        with self._lock:
            if not self._address:
                self._address = self._start()
            return self._address

    def _start(self) -> str:
        missing = [name for name in LAUNCHER_NEEDS if importlib.util.find_spec(name) is None]
        if missing:
            raise StackError(
                f"a stack of one's own needs packages that are not installed: {', '.join(missing)}",
                hint="pip install 'omnistage[cli,models]', or give the address of a router that runs: address='HOST:PORT'.",
            )
        ready_read, ready_write = os.pipe()
        lifeline_read, lifeline_write = os.pipe()
        try:
            process = subprocess.Popen(
                self._plan.command(ready_write, lifeline_read),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(ready_write, lifeline_read),
                start_new_session=True,  # a Ctrl-C in the terminal is ours to handle, not the stages'
            )
        finally:
            os.close(ready_write)
            os.close(lifeline_read)
        # Runs at garbage collection and at interpreter exit too, whatever becomes of this object.
        self._finalizer = weakref.finalize(self, _stop, process, lifeline_write)
        try:
            report = _read_report(ready_read, self._plan.settings.get("start_timeout_s", 900.0))
        finally:
            os.close(ready_read)
        if "address" in report:
            return report["address"]
        self.stop()
        error = StackError(
            report.get("error") or f"the launcher ended with code {process.returncode} before the stack was ready",
            hint=report.get("hint") or "Run `omnistage serve --verbose` to see what the processes say.",
        )
        error.log = report.get("log", "")
        raise error

    def stop(self) -> None:
        """End all processes and wait for them."""
        if self._finalizer is not None:
            self._finalizer()


def _read_report(ready_fd: int, timeout_s: float) -> dict[str, str]:
    """The launcher's one line of JSON: {"address"} or {"error", "hint", "log"}; empty if it ended without one."""
    deadline = time.monotonic() + timeout_s
    data = b""
    while not data.endswith(b"\n"):
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not select.select([ready_fd], [], [], left_s)[0]:
            return {
                "error": f"the stack was not ready within {timeout_s:g} s",
                "hint": "Give more time with start_timeout_s; the first start downloads the default model.",
            }
        piece = os.read(ready_fd, 65536)
        if not piece:
            return {}
        data += piece
    report: dict[str, str] = json.loads(data)
    return report


def _stop(process: subprocess.Popen[bytes], lifeline_write: int) -> None:
    os.close(lifeline_write)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        # Its children hold lifelines of their own and end when it does.
        process.kill()
        process.wait()
