"""A private stack: router and stages as processes of this machine, started for one client and ended with it.

The launcher, `omnistage serve`, starts and watches the processes. On one pipe it reports the router's address, and later the result for
each pipeline that the client asks for on a second pipe, the lifeline. When the lifeline closes, it ends everything that it started: in
`stop` and `close_pipes`, at the exit of this process, and when this process is killed. A forked child of this process does not hold the
pipe open, and nothing that the child does ends the launcher."""

from __future__ import annotations

import asyncio
import atexit
import importlib.util
import json
import os
import re
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

from omnistage.client import threads
from omnistage.client.errors import BadRequestError, ClosedError, ForkedError, StackError
from omnistage.client.options import OF_CLIENT, OPTIONS, SETTINGS, fault_of_stages
from omnistage.client.options import StackSettings as StackSettings
from omnistage.client.threads import on_thread, run_on_thread
from omnistage.client.wording import logger, of_launcher, unknown_settings

log = logger(__name__)

START_TIMEOUT_S = 900.0

BEGIN_THREAD = "omnistage-begin"

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
            if fault := fault_of_stages(SETTINGS[name], value):
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

    def command(self, ready_fd: int, lifeline_fd: int) -> list[str]:
        """The command line of the launcher. ready_fd: the descriptor on which it reports. lifeline_fd: the descriptor from which it reads
        requests; at the end of that pipe it ends."""
        settings = self.settings
        words = [sys.executable, "-m", "omnistage.cli", "serve", "--address", "127.0.0.1:0"]
        words += ["--ready-fd", str(ready_fd), "--lifeline-fd", str(lifeline_fd), "--client-share", "1"]
        if self.model_path is not None:
            words += ["--checkpoint", os.fspath(self.model_path)]
        for name, value in settings.items():
            if name not in ("pipeline", "start_timeout_s"):
                words += _option(name, value)
        words += _option("tensor_parallel_size", self.tensor_parallel_size)
        if "pipeline" in settings:
            words += ["--", *self.pipelines]
        return words


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


def _option(name: str, value: object) -> list[str]:
    """A setting as words of the launcher's command line."""
    if isinstance(value, Mapping):
        texts = [f"{stage}={_text(one)}" for stage, one in value.items()]
    else:
        texts = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [_text(value)]
    return [word for text in texts for word in (f"--{name.replace('_', '-')}", text)]


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class PrivateStack:
    """The processes of one plan. Any thread of the process that made this may call `start` and `stop`, any number of times.

    In a forked child of that process `stop` does nothing."""

    def __init__(self, plan: StackPlan) -> None:
        self._plan = plan
        self._address = ""
        self._starting = threading.RLock()
        self._launcher: Launcher | None = None
        self._is_given_up = False  # whether a start must end: by `give_up` or `stop`
        self._changed = threading.Condition()
        """Guards the fields below; notified of each answer."""
        self._answers: dict[str, Future[dict[str, str]]] = {}
        """The launcher's answers that are still to come, by pipeline. An answer that has come is removed: a pipeline that is lost later can
        be asked for again."""
        self._begin_calls: dict[str, Future[None]] = {}
        """The calls of `begin` that run on threads for callers on event loops, by pipeline."""
        self._is_reading = False  # whether one of the callers reads the launcher's pipe
        self._unread = b""  # the beginning of a line whose rest has not come
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
                self._address = self._start()
                log.info("the private stack serves on %s after %.1f s", self._address, time.monotonic() - begin_s)
            return self._address

    def _start(self) -> str:
        """Start the launcher and return HOST:PORT of the router when it serves. Raises the errors of `start`."""
        if any(importlib.util.find_spec(name) is None for name in LAUNCHER_NEEDS):
            hint = "Or give the address of a router that runs: {address=HOST:PORT}."
            raise StackError(f"only the client is installed here; a stack of one's own needs more: {install(*ALL_EXTRAS)}", hint=hint)
        # No fork here: a child would hold the pipes open, and neither this process nor the launcher would notice the end of the other.
        with threads.no_fork:
            launcher = self._launcher = Launcher(self._plan.command)
        # Garbage is collected on any thread, so this does not wait; the launcher then ends by itself.
        weakref.finalize(self, launcher.close_pipes).atexit = False
        if self._is_given_up:
            launcher.close_pipes()
        report = _read_report(launcher, self._plan.start_timeout_s)
        if "address" in report:
            return report["address"]
        launcher.stop()
        if self._is_given_up:
            raise ClosedError("the client was closed while its stack started")
        message = of_launcher(report.get("error", "")) or f"the launcher ended with code {launcher.returncode} before the stack was ready"
        usual_hint = "" if "error" in report else "Run `omnistage serve --verbose` to see what the processes say."
        error = StackError(message, hint=report.get("hint") or usual_hint)
        error.log = report.get("log", "")
        raise error

    async def begin_on_thread(self, pipeline: str) -> None:
        """Run `begin` on a thread, for a caller on an event loop; all callers that want the same pipeline share one thread. If a caller
        is cancelled, the start goes on for the others."""
        with self._changed:
            future = self._begin_calls.get(pipeline)
            if future is None:
                future = self._begin_calls[pipeline] = on_thread(lambda: self.begin(pipeline), BEGIN_THREAD)
                future.add_done_callback(lambda _: self._begin_calls.pop(pipeline, None))
        await asyncio.wrap_future(future)

    def begin(self, pipeline: str) -> None:
        """Start another pipeline of this stack, and return when it serves; at once if it serves already. Blocks. Raises StackError if it
        cannot start, after which this may be called again; ClosedError if the stack is stopped; ForkedError in a forked child."""
        if os.getpid() != self._owner:
            raise ForkedError("this stack is that of the parent of this process")
        self.start()
        until = time.monotonic() + self._plan.start_timeout_s
        future = self._ask_for(pipeline)
        while not future.done():
            self._await_answer(future, until)
        answer = future.result()
        if "error" not in answer:
            return
        if self._is_given_up:
            raise ClosedError(f"the client was closed while {pipeline} started")
        error = StackError(of_launcher(answer["error"]), hint=answer.get("hint", ""))
        error.log = answer.get("log", "")
        raise error

    def _ask_for(self, pipeline: str) -> Future[dict[str, str]]:
        """Ask the launcher to start a pipeline, unless its answer to an earlier question is still to come. Returns the future of the
        answer, a line of JSON as a dict, which all callers share."""
        with self._changed:
            future = self._answers.get(pipeline)
            if future is None:
                future = self._answers[pipeline] = Future()
                assert self._launcher is not None
                if not self._launcher.say(json.dumps({"start": pipeline}).encode() + b"\n"):
                    self._end_all_waiting()
            return future

    def _await_answer(self, future: Future[dict[str, str]], until: float) -> None:
        """Wait until the launcher has answered some caller. Only one of the waiting callers reads the pipe, for all of them. future: of the
        answer to this caller. until: time.monotonic() at which StackError is raised."""
        with self._changed:
            left_s = until - time.monotonic()
            if future.done():
                return
            if left_s <= 0:
                fault = f"the pipeline did not serve within {self._plan.start_timeout_s:g} s"
                raise StackError(fault, hint="Give more time with {start_timeout}.")
            if self._is_reading:
                self._changed.wait(left_s)
                return
            self._is_reading = True
        piece: bytes | None = None
        try:
            assert self._launcher is not None
            piece = self._launcher.read_piece(left_s)
        finally:
            with self._changed:
                self._is_reading = False
                self._take_in(piece)
                self._changed.notify_all()

    def _take_in(self, piece: bytes | None) -> None:
        """Give the launcher's answers to the callers that wait for them. piece: the next bytes of its output, which may end inside a line;
        None: nothing came; empty: the launcher has ended."""
        if piece == b"":
            self._end_all_waiting()
        *lines, self._unread = (self._unread + (piece or b"")).split(b"\n")
        for answer in map(json.loads, lines):
            future = self._answers.pop(answer["pipeline"], None)
            if future is not None:
                future.set_result(answer)

    def _end_all_waiting(self) -> None:
        """Give all waiting callers the error that the launcher has ended."""
        for pipeline, future in self._answers.items():
            future.set_result({"error": f"the launcher ended before {pipeline} served"})
        self._answers.clear()

    def give_up(self) -> None:
        """Have a start that still runs end soon, with its processes. Waits for nothing; a stack that has already started goes on."""
        if os.getpid() == self._owner and not self._address:
            self._is_given_up = True
            if self._launcher is not None:
                self._launcher.close_pipes()

    def stop(self) -> None:
        """End all processes and wait for them, also those of a start that still runs."""
        if os.getpid() != self._owner:
            return
        self.give_up()
        self._is_given_up = True
        if self._launcher is not None:
            self._launcher.stop()
        # The lock is held by a start that still runs, which ends soon.
        if self._starting.acquire(timeout=STOP_TIMEOUT_S + KILL_TIMEOUT_S):
            self._starting.release()
            if self._launcher is not None:  # Looked at again, because a start that ran meanwhile may have made it.
                self._launcher.stop()


def _read_report(launcher: Launcher, timeout_s: float) -> dict[str, str]:
    """The launcher's first line of JSON as a dict, {"address"} or {"error", "hint", "log"}; empty if it ended without a line. When the time
    is over, the dict has an error."""
    deadline = time.monotonic() + timeout_s
    data = b""
    while not data.endswith(b"\n"):
        piece = launcher.read_piece(max(deadline - time.monotonic(), 0))
        if piece is None:
            hint = "Give more time with {start_timeout}; the first start downloads the default model."
            return {"error": f"the stack was not ready within {timeout_s:g} s", "hint": hint}
        if not piece:
            return {}
        data += piece
    report: dict[str, str] = json.loads(data)
    return report


STOP_TIMEOUT_S = 20.0
KILL_TIMEOUT_S = 5.0


class Launcher:
    """A running `omnistage serve`. It stays in `_launchers` until its process has been waited for, even if no other object refers to it."""

    _launchers: ClassVar[set[Launcher]] = set()

    def __init__(self, command: Callable[[int, int], Sequence[str]]) -> None:
        """command: makes the command line from two descriptors, for the launcher's answers and for the lifeline. Make a Launcher only
        while no fork may begin."""
        for launcher in list(self._launchers):
            launcher._forget_if_over()
        lifeline_read, lifeline_write = os.pipe()
        answers_read, answers_write = os.pipe()
        # Each list is empty while a thread uses its descriptor, and once it is closed: so `close_pipes` needs no lock.
        self._lifeline, self._answers = [lifeline_write], [answers_read]
        self._is_cut = False
        self._lock = threading.Lock()
        try:
            self._process = subprocess.Popen(
                command(answers_write, lifeline_read),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(answers_write, lifeline_read),
                start_new_session=True,  # Ctrl-C in the terminal reaches only this process, which then decides
            )
        except BaseException:
            self.close_pipes()
            raise
        finally:
            os.close(lifeline_read)
            os.close(answers_write)
        self._launchers.add(self)

    @property
    def returncode(self) -> int | None:
        """The exit code; None: the process runs, or has not been waited for."""
        return self._process.returncode

    def close_pipes(self) -> None:
        """Close the pipes, so that the launcher ends, and wait for nothing. Takes no lock: garbage collection may call this on any
        thread."""
        self._is_cut = True
        for fds in (self._lifeline, self._answers):
            with suppress(IndexError):
                os.close(fds.pop())

    def say(self, line: bytes) -> bool:
        """Write a line into the lifeline; returns False if it is closed, or the launcher has ended. One thread at a time may call this."""
        # A child forked now would not find the lifeline in its list, would not close it, and so would keep the launcher running.
        with threads.no_fork:
            try:
                fd = self._lifeline.pop()
            except IndexError:
                return False
            try:
                os.write(fd, line)
            except BrokenPipeError:
                return False
            finally:
                self._lifeline.append(fd)
                if self._is_cut:  # Perhaps meanwhile, when `close_pipes` did not find the descriptor in the list.
                    self.close_pipes()
        return True

    def read_piece(self, timeout_s: float) -> bytes | None:
        """Read the next piece of the launcher's output. Empty: the output has ended. None: nothing came in `timeout_s`. Only one thread may
        call this at a time."""
        try:
            fd = self._answers.pop()
        except IndexError:
            return b""
        try:
            poller = select.poll()  # `select` refuses descriptors above 1023.
            poller.register(fd, select.POLLIN)
            return os.read(fd, 65536) if poller.poll(1000 * timeout_s) else None
        finally:
            self._answers.append(fd)
            if self._is_cut:  # As in `say`.
                self.close_pipes()

    def stop(self) -> None:
        """Close the pipes and wait for the end of all processes; after `STOP_TIMEOUT_S` seconds kill them."""
        if self not in self._launchers:
            return
        self.close_pipes()
        with self._lock:
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                # The launcher's own children notice its end, and end too.
                self._process.kill()
                self._process.wait(KILL_TIMEOUT_S)
            self._launchers.discard(self)

    def _forget_if_over(self) -> None:
        """Remove this launcher from `_launchers` if its process has ended."""
        if self._process.poll() is not None:
            self.close_pipes()
            self._launchers.discard(self)

    @classmethod
    def stop_all(cls) -> None:
        """Stop all launchers, at the end of the interpreter."""
        with ExitStack() as exits:
            for launcher in list(cls._launchers):
                exits.callback(launcher.stop)

    @classmethod
    def leave_all_to_parent(cls) -> None:
        """In a forked child: forget all launchers. They belong to the parent, and end when the parent ends."""
        for launcher in cls._launchers:
            launcher.close_pipes()
            launcher._process.returncode = 0  # no child of this process: without a code Python would warn that it still runs
        cls._launchers.clear()


atexit.register(Launcher.stop_all)
os.register_at_fork(after_in_child=Launcher.leave_all_to_parent)


ALL_EXTRAS = ("cli", "convert", "models")
"""Extras that run models on this machine, the default ones too."""


def install(*extras: str) -> str:
    """The command that installs these extras, in the words of docs/client.md. Code that cannot import the client has a copy of these
    words; a test compares them."""
    return f"`make wheels` in a clone, then pip install --find-links dist 'omnistage[{','.join(extras)}]'"
