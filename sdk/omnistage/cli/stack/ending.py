"""The begin and the end of a stack that `omnistage serve` runs. A bar for each process shows the start, and lines say what happens to the
processes later. The stack ends at a signal (at the first one running answers may finish, at the second everything ends at once), when it
has had no requests for a while, or with its owner: the process that started this launcher."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from omnistage.cli import interrupt
from omnistage.cli.console import Notices
from omnistage.cli.stack.layout import GATEWAY, ROUTER, Layout
from omnistage.cli.stack.stack import Stack
from omnistage.client.errors import OmniError, StackError
from omnistage.client.threads import run_on_thread
from omnistage.host.background import end_tasks

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

EVENT_COLOURS = {"restarted": "green", "ended": "yellow"}


@asynccontextmanager
async def start_stack(
    layout: Layout, log_folder: Path | None, verbose: bool, on_begin: Callable[[Stack], object] | None = None
) -> AsyncIterator[Stack]:
    """Start a stack, and stop it at the end of this block. A bar per process shows the start, on stderr if that is a terminal; the bars are
    gone when the stack serves. From then on a line says which process was lost, and another one when it serves again. on_begin: called with
    the stack before it starts."""
    console = Notices()
    columns = (TextColumn("{task.description:>12}"), BarColumn(24), TimeElapsedColumn())
    progress = Progress(*columns, console=console, transient=True, disable=verbose or not console.is_terminal)
    tasks: dict[str, TaskID] = {}

    def done(name: str) -> None:
        if name in tasks:  # Processes of later pipelines have no bar.
            progress.update(tasks[name], total=1, completed=1)

    def tell(event: str, text: str) -> None:
        console.report(f"[bold {EVENT_COLOURS.get(event, 'red')}]{event}[/] {escape(text)}")

    stack = Stack(layout, log_folder=log_folder, verbose=verbose, report=done, tell=tell)
    if on_begin is not None:
        on_begin(stack)
    tasks = {name: progress.add_task(name, total=None) for name in stack.names}
    with progress:
        await stack.start()
    try:
        yield stack
    finally:
        await stack.stop()


RUNNING = "omnistage_router_inflight"
"""The metric by which a router counts its running answers."""

LOOK_S = 0.5
"""How long the router may take to say how many answers run."""


class Ending:
    """Cancels the task that serves, at the first signal or at a call of `begin`; kills all processes at the second signal.

    task: the task that serves. grace_s: seconds that running answers get. notices: prints what the end waits for; None: print nothing, for
    a private stack, whose owner does not wait. stack: None until `ends` is called.
    """

    def __init__(self, task: asyncio.Task[object], grace_s: float, notices: Notices | None) -> None:
        self.stack: Stack | None = None
        self.last_signal = signal.SIGTERM
        self.serves = False
        """Whether the stack has started."""
        self.has_begun = False
        """Whether the end has begun."""
        self.is_now = False
        """Whether a second signal came, so that no answer is waited for any more."""
        self._task = task
        self._grace_s = grace_s
        self._notices = notices
        self._is_closed = False  # whether `close` was called
        self._telling: asyncio.Task[None] | None = None

    def ends(self, stack: Stack) -> None:
        """Set the stack that a signal ends."""
        self.stack = stack

    def heed(self) -> None:
        """Handle signals from now on."""
        loop = asyncio.get_running_loop()
        for number in interrupt.heeded_signals():
            loop.add_signal_handler(number, self._signalled, number)

    async def close(self) -> None:
        """Print nothing and cancel nothing from now on."""
        self._is_closed = True
        if self._telling is not None:
            await end_tasks({self._telling})

    def _signalled(self, number: signal.Signals) -> None:
        """At the first signal begin the end; at the second end everything at once; ignore further signals."""
        self.last_signal = number
        if not self.has_begun:
            self.begin(f"on {number.name}")
        elif not self.is_now:
            self.is_now = True
            if self._telling is not None:
                self._telling.cancel()
            self._cancel()
            self._say("[bold]ending now[/]")
            if self.stack is not None:
                self.stack.kill()

    def begin(self, reason: str) -> None:
        """Begin the end, as the first signal does. reason: stands after the word "ending" in the printed line."""
        if self.has_begun:
            return
        self.has_begun = True
        # Only a stack that serves has answers to wait for, and only with notices is anybody told.
        if self._notices is None or self.stack is None or not self.serves:
            self._say(f"[bold]ending[/] {reason}, before it serves")
            self._cancel()
        else:
            self._telling = asyncio.create_task(self._tell(reason, self.stack.metrics_addresses()[ROUTER]))

    async def _tell(self, reason: str, address: str) -> None:
        """Print what the end waits for, and cancel the task. reason: see `begin`. address: HOST:PORT of the router's metrics."""
        try:
            running = await _running_answers(address)
            self._say(f"[bold]ending[/] {reason}{self._waits_for(running)}")
        finally:
            self._cancel()

    def _cancel(self) -> None:
        """Cancel the task, but only once: the clean-up of the stack must not be cancelled too."""
        if not self._is_closed and not self._task.cancelling():
            self._task.cancel()

    def _waits_for(self, answers: int | None) -> str:
        """The last part of the printed line, which says how many running answers the end waits for, and how long. It is empty if none runs.
        answers: number of running answers; None: not known."""
        if answers == 0:
            return ""
        texts = {None: "answers that run get", 1: "1 answer runs and gets"}
        text = texts.get(answers, f"{answers} answers run and get")
        signal_text = "Ctrl-C again" if self.last_signal == signal.SIGINT else f"{self.last_signal.name} again"
        return f": {text} up to {self._grace_s:g} s; {signal_text} ends it all now"

    def _say(self, markup: str) -> None:
        if self._notices is not None:
            self._notices.report(markup)


def _samples(address: str) -> list[Sample] | None:
    """The samples of the metrics page at HOST:PORT; None: there is no page. Blocks."""
    from omnistage.cli.show.metrics import fetch_page

    page = fetch_page(address)
    return None if page is None else [sample for family in page for sample in family.samples]


async def _running_answers(address: str) -> int | None:
    """How many answers a router runs; None if it does not say so in time. address: HOST:PORT of its metrics."""
    with suppress(TimeoutError):
        async with asyncio.timeout(LOOK_S):
            samples = await run_on_thread(lambda: _samples(address), "omnistage-last-look")
            return next((int(sample.value) for sample in samples or () if sample.name == RUNNING), None)
    return None


IDLE_LOOKS = 10
"""How many times the metrics are read within the time limit."""

MAX_PERIOD_S = 60.0
"""The longest pause between two readings, in seconds."""

REQUEST_COUNTS = ("omnistage_router_requests_total", "omnistage_gateway_requests_total")
"""Metrics that count requests. An answer over HTTP counts twice, a page that is opened counts once."""

LOOKING = frozenset(
    (
        *("/health", "/ready", "/metrics", "/openapi.json", "/docs"),
        *("/v1/models", "/v1/models/{model}", "/v1/audio/models", "/v1/audio/voices"),
        *("/api/tags", "/api/ps", "/api/show", "/api/version"),
    )
)
"""Endpoints of the gateway whose calls are no real requests: a forgotten page, or a monitor, may call them for ever."""

NOWHERE = "404"
"""Status of a request for a missing path, as scanners send it: no real request either."""

Count = frozenset[tuple[str, tuple[tuple[str, str], ...], float]]
"""The samples of the metrics that count requests: the name, the labels and the value of each."""


async def watch_requests(limit_s: float, addresses: Callable[[], Mapping[str, str]], end: Callable[[], object]) -> None:
    """Compare the counts of requests again and again, and call `end` when they have not changed for limit_s seconds. addresses: returns
    HOST:PORT of the metrics of all processes, by name."""
    clock = asyncio.get_running_loop().time
    idle_since, last_counts = clock(), await count_requests(addresses())
    while clock() - idle_since < limit_s:
        await asyncio.sleep(min(limit_s / IDLE_LOOKS, MAX_PERIOD_S))
        counts = await count_requests(addresses())
        if counts is None or counts != last_counts:
            idle_since, last_counts = clock(), counts
    end()


def asks(labels: Mapping[str, str]) -> bool:
    """Whether a counted call with these labels was a real request."""
    return labels.get("endpoint") not in LOOKING and labels.get("status") != NOWHERE


async def count_requests(addresses: Mapping[str, str]) -> Count | None:
    """The counts of requests. They differ from earlier counts if a request came since, or a process was started again. None: an answer is
    running, or a process gives no metrics. addresses: HOST:PORT of the metrics of processes, by name."""

    def look() -> Count | None:
        pages = [_samples(address) for name in (ROUTER, GATEWAY) if (address := addresses.get(name))]
        samples = [sample for page in pages for sample in page or ()]
        if None in pages or any(sample.value for sample in samples if sample.name == RUNNING):
            return None
        request_samples = (sample for sample in samples if sample.name in REQUEST_COUNTS and asks(sample.labels))
        return frozenset((sample.name, tuple(sample.labels.items()), sample.value) for sample in request_samples)

    return await run_on_thread(look, "omnistage-idle-look")


MAX_LINE_BYTES = 4096
"""The most bytes of a request: the name of a pipeline."""
MAX_ORDER_BYTES = 1 << 20


class Owner:
    """The program that has the stack started, at the other end of a socket: first it writes what to start, as a line of JSON. is_there:
    whether there is one. is_private: whether the stack ends with it; it may ask for pipelines meanwhile."""

    def __init__(self, fd: int = -1) -> None:
        """fd: this end of the socket; -1: nobody owns the stack."""
        self.is_there = fd >= 0
        self.is_private = False
        self._fd = fd
        self._has_been_told = False
        self._unread = b""  # the beginning of a line whose rest has not come

    def read_order(self) -> dict[str, Any]:
        """Read what to start. Raises ValueError if the owner ends before its line does, or if that has more than MAX_ORDER_BYTES."""
        data = b""
        while not data.endswith(b"\n"):
            piece = os.read(self._fd, MAX_ORDER_BYTES)
            data += piece
            if len(data) > MAX_ORDER_BYTES:
                raise ValueError(f"the order has more than {MAX_ORDER_BYTES >> 20} MiB")
            if not piece:
                raise ValueError("the owner has ended")
        order: dict[str, Any] = json.loads(data)
        self.is_private = bool(order.pop("is_private"))
        return order

    def tell_first(self, line: dict[str, str]) -> bool:
        """Write the first line, which says that the stack serves, or an error. Returns whether an owner waited for it."""
        if self._fd < 0 or self._has_been_told:
            return False
        self._has_been_told = True
        self.tell(line)
        if not self.is_private:
            os.close(self._fd)
            self._fd = -1
        return True

    def tell(self, line: dict[str, str]) -> None:
        """Write a line. An owner that has ended meanwhile does not get it."""
        if self._fd >= 0:
            with suppress(BrokenPipeError, ConnectionResetError):
                os.write(self._fd, json.dumps(line).encode() + b"\n")

    def listen(self, on_pipeline: Callable[[str], object], on_end: Callable[[], object]) -> None:
        """Listen to the owner on the running loop. on_pipeline: called with the name of each pipeline that the owner asks for. on_end:
        called once, when the owner has ended."""
        if self.is_private:
            asyncio.get_running_loop().add_reader(self._fd, self._readable, on_pipeline, on_end)

    def _readable(self, on_pipeline: Callable[[str], object], on_end: Callable[[], object]) -> None:
        """Read from the owner, and call `on_pipeline` for each line, or `on_end` at its end or for a line that is too long."""
        try:
            data = os.read(self._fd, MAX_LINE_BYTES)
        except ConnectionResetError:  # The owner ended without reading all reports.
            data = b""
        *lines, self._unread = (self._unread + data).split(b"\n")
        if not data or len(self._unread) > MAX_LINE_BYTES:
            asyncio.get_running_loop().remove_reader(self._fd)
            on_end()
            return
        for line in lines:
            try:
                name = str(json.loads(line)["start"])
            except (ValueError, TypeError, KeyError):
                self.tell({"pipeline": "", "error": f"{line[:64]!r} asks for nothing", "hint": 'Write {"start": NAME}, a line each.'})
            else:
                on_pipeline(name)

    @contextmanager
    def ends_all(self) -> Iterator[None]:
        """A context in which the end of the owner ends this process at once. The process may be fetching gigabytes, for which nobody
        waits any more. A later fetch goes on where this one ended, and nothing else needs a clean-up."""
        if not self.is_private:
            yield
            return
        over_read, over_write = os.pipe()  # Closing its writing end ends the thread.

        def watch() -> None:
            listening = select.poll()
            for fd in (self._fd, over_read):
                listening.register(fd, select.POLLIN)
            if self._fd in dict(listening.poll()):
                os._exit(1)

        watching = threading.Thread(target=watch, daemon=True)
        watching.start()
        try:
            yield
        finally:
            os.close(over_write)
            watching.join()
            os.close(over_read)


def error_line(error: OmniError) -> dict[str, str]:
    """An error as a line for the owner."""
    return {"error": error.message, "hint": error.advice, "log": error.log if isinstance(error, StackError) else ""}
