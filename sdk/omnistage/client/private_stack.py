"""A private stack: router and stages as processes of this machine, started for one client and ended with it.

The launcher, `omnistage launch DESCRIPTOR`, gets its order as JSON over a socket, and starts and watches the processes. There it
reports the router's address, and later the result for each pipeline that the client asks for. When the socket ends, it ends everything
that it started: in `stop` and `disconnect`, at the exit of this process, and when this process is killed. A forked child of this process
does not hold the socket open, and nothing that the child does ends the launcher."""

from __future__ import annotations

import asyncio
import atexit
import importlib.util
import json
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, cast

from omnistage.client.errors import BadRequestError, ClosedError, ForkedError, StackError
from omnistage.client.options import OF_CLIENT, OPTIONS, SETTINGS, fault_of, fault_of_stages, plain
from omnistage.client.options import StackSettings as StackSettings
from omnistage.client.stage_settings import StageOptions
from omnistage.client.threads import run_on_thread
from omnistage.client.wording import logger, of_launcher, unknown_settings
from omnistage.host.child import ConnectedChild, describe_end

log = logger(__name__)

START_TIMEOUT_S = 900.0

OF_STAGES = frozenset({"device", "replicas", "tensor_parallel_size", *StageOptions.__annotations__})
"""Settings with a value for each stage."""
OF_SERVERS = ("inline_limit",)
"""Settings that the servers of a stack share."""

READING_THREAD = "omnistage-launcher"

LAUNCHER_NEEDS = ("typer", "rich", "pydantic_settings", "yaml", "structlog", "prometheus_client", "posix_ipc")
"""Packages of the launcher and its servers that a client alone does not need: those of the extras `cli` and `server`."""


@dataclass(frozen=True, slots=True)
class StackPlan:
    """The stack to start. Raises TypeError for settings that do not exist, BadRequestError for impossible values. A setting that the model
    does not have is a StackError at the start."""

    settings: StackSettings = field(default_factory=lambda: StackSettings())
    model_path: str | PathLike[str] | None = None
    tensor_parallel_size: int | Mapping[str, int] = 1

    def __post_init__(self) -> None:
        unknown = sorted(set(self.settings) - set(StackSettings.__annotations__))
        if unknown:
            raise unknown_settings(unknown, (*OF_CLIENT, *SETTINGS), OPTIONS)
        for name, value in {**self.settings, "tensor_parallel_size": self.tensor_parallel_size}.items():
            is_named = name == "pipeline" and isinstance(value, Mapping)  # By names that its keys give, and not by stage.
            if fault := (fault_of if is_named else fault_of_stages)(SETTINGS[name], value):
                raise BadRequestError.of(name, fault)
        path = self.model_path
        if path is None:
            return
        if not isinstance(path, str | PathLike) or not str(path):
            state = "empty" if path == "" else repr(path)
            raise BadRequestError.of("model_path", f"is {state}; give the folder of a checkpoint, or the name of one at a hub, owner/name")
        if not Path(path).is_dir() and not _may_be_name(path):
            raise BadRequestError.of("model_path", f"{os.fspath(path)} is not a folder")

    @property
    def says_nothing(self) -> bool:
        """Whether the plan has only defaults, so that any running router can be asked instead."""
        return self.model_path is None and self.tensor_parallel_size == 1 and not set(self.settings) - {"start_timeout_s"}

    @property
    def pipelines(self) -> tuple[str, ...]:
        """The pipelines that are named; empty: the default pipelines, or the one of the checkpoint."""
        pipelines = self.settings.get("pipeline", ())
        if isinstance(pipelines, Mapping):
            return tuple(f"{name}={source}" for name, source in pipelines.items())
        return (pipelines,) if isinstance(pipelines, str) else tuple(pipelines)

    @property
    def start_timeout_s(self) -> float:
        """Time limit for download, load and start together, in seconds."""
        return float(self.settings.get("start_timeout_s", START_TIMEOUT_S))  # System calls refuse NumPy numbers as times.

    @property
    def label(self) -> str:
        """The names of the pipelines, or of the checkpoint, in words for people."""
        pipeline = ", ".join(self.pipelines)
        if self.model_path is None:
            return pipeline or "the default pipeline"
        return f"{os.fspath(self.model_path)}{' as ' if pipeline else ''}{pipeline}"

    @property
    def order(self) -> dict[str, Any]:
        """The stack to start, as the launcher takes it: the fields of its Choice."""
        settings = {**self.settings, "tensor_parallel_size": self.tensor_parallel_size}
        by_stage = {name: _by_stage(value) for name, value in settings.items() if name in OF_STAGES}
        lora = settings.get("lora", ())
        return {
            "pipelines": self.pipelines,
            "checkpoints": {} if self.model_path is None else {"": os.fspath(self.model_path)},
            "devices": by_stage.pop("device", {}),
            "replicas": by_stage.pop("replicas", {}),
            "dtype": settings.get("dtype", "auto"),
            "settings": by_stage,
            "servers": {
                "max_sessions": plain(settings.get("max_sessions", 0)),
                "settings": {name: plain(settings[name]) for name in OF_SERVERS if name in settings} | {"client_share": 1.0},
            },
            "loras": [lora] if isinstance(lora, str) else list(cast(Sequence[str], lora)),
            "log_folder": None,
            "verbose": False,
            "is_private": True,
        }


def launcher_command(fd: int) -> list[str]:
    """The command line of the launcher. fd: its end of a socket, on which it gets the order and reports."""
    return [sys.executable, "-m", "omnistage.cli", "launch", str(fd)]


def with_first(first: object, settings: StackSettings) -> StackSettings:
    """The settings with `first` as their `pipeline`. first: the unnamed first argument of a client, a pipeline's name or what else
    `omnistage serve` takes in its place. Raises TypeError if `settings` has a pipeline too, BadRequestError for an address."""
    if first is None:
        return settings
    if "pipeline" in settings:
        raise TypeError("the first argument is the pipeline, and pipeline is another one: leave one of them out")
    # Such a text is HOST:PORT, perhaps with further addresses after a comma, or a URL.
    if isinstance(first, str) and (re.fullmatch(r"[^/\s]*:\d+(,.*)?", first) or "://" in first):
        host = re.sub(r"^[a-z]+://|/.*$", "", first)
        raise BadRequestError.of("pipeline", f"is the address of a router, {first}; give it by name: Omni(address={host!r})")
    if first == "":
        raise BadRequestError.of("pipeline", "is empty; give its name, the folder of a checkpoint, or leave it out")
    pipeline: Any = os.fspath(first) if isinstance(first, PathLike) else first
    return {**settings, "pipeline": pipeline}


def _may_be_name(model_path: str | PathLike[str]) -> bool:
    """Whether this has the form owner/name of a model's name at a hub; the launcher checks the rest."""
    return isinstance(model_path, str) and re.fullmatch(r"[^/.~][^/]*/[^/@]+(@.+)?", model_path) is not None


def _by_stage(value: object) -> dict[str, str]:
    """The texts of a setting by stage; "" stands for all stages."""
    values = value if isinstance(value, Mapping) else {"": value}
    return {stage: str(each).lower() if isinstance(each, bool) else str(each) for stage, each in values.items()}


Report = dict[str, str]
"""A line of the launcher, as a dict: {"address"} or {"pipeline"}, or one with an error: {"error", "hint", "log"}."""


class PrivateStack:
    """The processes of one plan. Any thread of the process that made this may call `start` and `stop`, any number of times.

    In a forked child of that process `stop` does nothing."""

    def __init__(self, plan: StackPlan) -> None:
        self._plan = plan
        self._address = ""
        self._starting = threading.RLock()
        self._launcher: Launcher | None = None
        self._is_given_up = False  # whether a start must end: by `give_up` or `stop`
        self._owner = os.getpid()

    @property
    def start_limit_s(self) -> float:
        """How long `start` takes at most, in seconds: the time in the settings, and the time to end processes that did not get ready."""
        return self._plan.start_timeout_s + STOP_TIMEOUT_S + KILL_TIMEOUT_S

    @property
    def address(self) -> str:
        """HOST:PORT of the router; empty until it has started."""
        return self._address

    async def start_on_thread(self) -> str:
        """Run `start` on a thread, for a caller on an event loop. If the caller is cancelled, the start goes on for the next caller."""
        return await run_on_thread(self.start, "omnistage-start")

    def start(self) -> str:
        """Start everything and return HOST:PORT of the router when it serves. Blocks. Raises StackError, and ClosedError if `give_up` ended
        the start."""
        with self._starting:
            if not self._address:
                log.info("starting a private stack: %s", self._plan.label)
                begin_s = time.monotonic()
                self._address = self._start()["address"]
                log.info("the private stack serves on %s after %.1f s", self._address, time.monotonic() - begin_s)
            return self._address

    def _start(self) -> Report:
        """Start the launcher and return its report when the router serves. Raises the errors of `start`."""
        if any(importlib.util.find_spec(name) is None for name in LAUNCHER_NEEDS):
            hint = "Or give the address of a router that runs: {address=HOST:PORT}."
            raise StackError(f"only the client is installed here; a stack of one's own needs more: {install(*ALL_EXTRAS)}", hint=hint)
        launcher = self._launcher = Launcher(self._plan.order)
        # Garbage is collected on any thread, so this does not wait; the launcher then ends by itself.
        weakref.finalize(self, launcher.disconnect).atexit = False
        if self._is_given_up:
            launcher.disconnect()
        try:
            report = launcher.first_report.result(self._plan.start_timeout_s)
        except TimeoutError:
            hint = "Give more time with {start_timeout}; the first start downloads the default model."
            report = {"error": f"the stack was not ready within {self._plan.start_timeout_s:g} s", "hint": hint}
        if "address" not in report:
            launcher.stop()
            if not report:
                message = f"the launcher ended with {describe_end(launcher.code or 0, 'code')} before the stack was ready"
                report = {"error": message, "hint": "Run `omnistage serve --verbose` to see what the processes say."}
        return self._checked(report, "its stack")

    async def begin_on_loop(self, pipeline: str) -> None:
        """Do as `begin`, for a caller on an event loop. If the caller is cancelled, the start goes on for the others."""
        self._check_owner()
        if not self._address:
            await self.start_on_thread()
        try:
            async with asyncio.timeout(self._plan.start_timeout_s):
                report = await asyncio.wrap_future(self._ask_for(pipeline))
        except TimeoutError:
            raise self._timeout_error() from None
        self._checked(report, pipeline)

    def begin(self, pipeline: str) -> None:
        """Start another pipeline of this stack, and return when it serves; at once if it serves already. Blocks. Raises StackError if it
        cannot start, after which this may be called again; ClosedError if the stack is stopped; ForkedError in a forked child."""
        self._check_owner()
        self.start()
        try:
            report = self._ask_for(pipeline).result(self._plan.start_timeout_s)
        except TimeoutError:
            raise self._timeout_error() from None
        self._checked(report, pipeline)

    def _ask_for(self, pipeline: str) -> Future[Report]:
        """Ask the launcher to start a pipeline. Returns the future of its report."""
        assert self._launcher is not None
        return self._launcher.ask_for(pipeline)

    def _check_owner(self) -> None:
        """Raises ForkedError in a forked child."""
        if os.getpid() != self._owner:
            raise ForkedError("this stack is that of the parent of this process")

    def _timeout_error(self) -> StackError:
        """The error for a pipeline that does not serve in time."""
        fault = f"the pipeline did not serve within {self._plan.start_timeout_s:g} s"
        return StackError(fault, hint="Give more time with {start_timeout}.")

    def _checked(self, report: Report, label: str) -> Report:
        """The report, unless it has an error: then raises it as StackError, or ClosedError if the start of `label` was given up."""
        if "error" not in report:
            return report
        if self._is_given_up:
            raise ClosedError(f"the client was closed while {label} started")
        error = StackError(of_launcher(report["error"]), hint=report.get("hint", ""))
        error.log = report.get("log", "")
        raise error

    def give_up(self) -> None:
        """Have a start that still runs end soon, with its processes. Waits for nothing; a stack that has already started goes on."""
        if os.getpid() == self._owner and not self._address:
            self._is_given_up = True
            if self._launcher is not None:
                self._launcher.disconnect()

    def stop(self) -> None:
        """End all processes and wait for them, also those of a start that still runs."""
        if os.getpid() != self._owner:
            return
        self._is_given_up = True
        if self._launcher is not None:
            self._launcher.stop()
        # The lock is held by a start that still runs, which ends soon.
        if self._starting.acquire(timeout=STOP_TIMEOUT_S + KILL_TIMEOUT_S):
            self._starting.release()
            if self._launcher is not None:  # Looked at again, because a start that ran meanwhile may have made it.
                self._launcher.stop()


STOP_TIMEOUT_S = 20.0
KILL_TIMEOUT_S = 5.0


class Launcher:
    """A running `omnistage launch`, and the thread that reads its reports and waits for its end, also when no other object refers to it.

    first_report: the future of the first report; it gets {} if the launcher ends without one."""

    _launchers: ClassVar[set[Launcher]] = set()

    def __init__(self, order: Mapping[str, Any]) -> None:
        """order: what to start, see StackPlan.order. Raises OSError, and RuntimeError if there can be no further thread."""
        self.first_report = _new_future()
        self.code: int | None = None
        """The exit code; None: the process runs."""
        self._reports: dict[str, Future[Report]] = {}
        """The reports that are still to come, by pipeline. One that has come is removed: a pipeline that is lost later can be asked for
        again."""
        self._lock = threading.Lock()  # for `_reports`
        self._order = order
        self._process = ConnectedChild(launcher_command)
        self._reading = threading.Thread(target=self._read, name=READING_THREAD, daemon=True)
        self._launchers.add(self)
        with ExitStack() as undo:
            undo.callback(self._process.close)
            undo.callback(self._launchers.discard, self)
            self._reading.start()
            undo.pop_all()

    def _read(self) -> None:
        """Give the reports to the callers that wait for them, until the launcher has ended."""
        try:
            self._send(self._order)  # Here, where nobody waits: a launcher that hangs does not take it.
            for line in self._process.lines():
                report: Report = json.loads(line)
                with self._lock:
                    future = self._reports.pop(report.get("pipeline", ""), None) if self.first_report.done() else self.first_report
                if future is not None:
                    future.set_result(report)
        finally:  # Also after a line that is no report.
            self.disconnect()
            if not self.first_report.done():
                self.first_report.set_result({})
            self._give_up_reports()
            self.code = self._process.wait()
            self._process.close()
            self._launchers.discard(self)

    def ask_for(self, pipeline: str) -> Future[Report]:
        """Ask for a pipeline, unless the report about it is still to come. Returns the future of that report, which all callers share."""
        with self._lock:
            if (future := self._reports.get(pipeline)) is not None:
                return future
            future = self._reports[pipeline] = _new_future()
        self._send({"start": pipeline})
        return future

    def _send(self, message: Mapping[str, Any]) -> None:
        """Write a line to the launcher; if it has ended, all callers that wait hear it."""
        try:
            self._process.channel.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self._give_up_reports()

    def _give_up_reports(self) -> None:
        """Report to all callers that the launcher has ended."""
        with self._lock:
            reports, self._reports = self._reports, {}
        for pipeline, future in reports.items():
            future.set_result({"error": f"the launcher ended before {pipeline} served"})

    def disconnect(self) -> None:
        """End the connection, so that the launcher ends, and wait for nothing. Takes no lock: garbage collection may call this on any
        thread."""
        self._process.disconnect()

    def stop(self) -> None:
        """End the connection and wait for the end of all processes; after `STOP_TIMEOUT_S` seconds kill them."""
        self.disconnect()
        self._reading.join(STOP_TIMEOUT_S)
        if self._reading.is_alive():
            # The launcher's own children notice its end, and end too.
            self._process.kill()
            self._reading.join(KILL_TIMEOUT_S)

    @classmethod
    def stop_all(cls) -> None:
        """Stop all launchers, at the end of the interpreter."""
        with ExitStack() as exits:
            for launcher in list(cls._launchers):
                exits.callback(launcher.stop)


def _new_future() -> Future[Report]:
    """A future that no caller can cancel: others wait for it too."""
    future: Future[Report] = Future()
    future.set_running_or_notify_cancel()
    return future


atexit.register(Launcher.stop_all)
os.register_at_fork(after_in_child=Launcher._launchers.clear)


ALL_EXTRAS = ("cli", "convert", "models")
"""Extras that run models on this machine, the default ones too."""


def install(*extras: str) -> str:
    """The command that installs these extras, in the words of docs/client.md. Code that cannot import the client has a copy of these
    words; a test compares them."""
    return f"`make wheels` in a clone, then pip install --find-links dist 'omnistage[{','.join(extras)}]'"
