"""The life of a server process, whatever it is called over, from the command line to the exit code: bind, get ready, serve, drain, stop.

Three things end the process: a thread that ends by an unforeseen error; a thread that hangs, also the event loop's; and the end of a
lasting task. An engine without its thread answers nobody, and a router without its watchers knows nothing. Such a process must end, because
other processes take over only when a process is gone. Work that the process can do without (background.py) never ends it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Protocol, TypeVar

import structlog
from prometheus_client import CollectorRegistry

from omnistage.host.addresses import check_can_listen, host_and_port
from omnistage.host.background import LastingTasks, first_of, is_spare, start_spare
from omnistage.host.descriptors import raise_limit
from omnistage.host.errors import StartError
from omnistage.host.logs import configure_logs, drain_logs
from omnistage.host.metrics import serve_metrics
from omnistage.host.settings import ServerSettings, read_settings
from omnistage.host.spans import Tracer
from omnistage.host.startup import collect_from_now_on, use_huge_pages
from omnistage.host.terminal import guard_standard_streams
from omnistage.host.watchdog import EventLoop, Watchdog, Watched, answering
from omnistage.wire.channel import Credentials as Credentials

log = structlog.get_logger(__name__)

LAST_TASKS_S = 0.5

SETTLE_AFTER_S = 5.0
"""Seconds from the start of serving to slow work, so that the rest of a starting stack is not held up."""

SETTLE_AGAIN_S = 60.0
"""Seconds from a failure to the next try, for example if descriptors are short."""

BROKEN_LIMIT_S = 5.0
"""A broken process ends within this time, even if other parts of it hang."""

BROKEN = 70
"""Exit code of a broken process (EX_SOFTWARE of sysexits.h)."""


class Broken(RuntimeError):
    """A thread of this process ended by an error or hangs, or a lasting task ended, so nobody does its work any more."""


class Service(Protocol):
    """The service of a process. lasting: its tasks that run as long as the process."""

    lasting: LastingTasks
    """Background work; the service closes it."""

    def bound(self, address: str) -> None:
        """Note that the server listens at this address. Called once, before `start`."""

    async def start(self) -> None:
        """Load, check and warm up. Health says SERVING only afterwards."""

    @property
    def threads(self) -> Sequence[Watched]:
        """Threads that compute, to be watched from the end of `start` on."""

    async def drain(self, grace_s: float) -> None:
        """Refuse new sessions and let the running ones finish, at most for `grace_s`."""

    def fail(self) -> None:
        """The process is broken and about to end. From now on no session may end with an error of its own: the streams break off, so that
        the other end takes that for the loss of this process. A thread that hangs never ends, so `close` must not wait for one."""

    async def close(self) -> None: ...


class Listener(Protocol):
    """The port of a service."""

    def bind(self) -> str:
        """Bind the port. Returns its HOST:PORT. Called once, before all other methods. Raises StartError."""

    async def open(self) -> None:
        """Take calls. Health says NOT_SERVING until `say`."""

    async def say(self, *, serves: bool) -> None:
        """Set the health: SERVING if `serves`, else NOT_SERVING."""

    async def close(self, *, is_broken: bool) -> None:
        """Accept no more calls, and let the running calls end. is_broken: end them at once."""


async def serve(
    settings: ServerSettings, service: Service, listener: Listener, registry: CollectorRegistry, ready: Mapping[str, str]
) -> None:
    """Run a service, from the binding of its port to its end, until SIGTERM, SIGINT or the end of the lifeline. registry: its metrics.
    ready: more fields of the ready line. Raises StartError or Broken."""
    address = listener.bind()
    service.bound(address)
    metrics_address = _metrics(settings.metrics_address, registry)
    stopped = _stop_event(settings.lifeline_fd)
    line: dict[str, object] = {"address": address, "metrics_address": metrics_address, "pid": os.getpid(), **ready}
    with _breakage(service) as breakage, EventLoop() as loop, Watchdog((loop,), breakage.by_hanging), answering(settings.liveness_fd):
        await listener.open()
        try:
            await _unless_broken(_live(settings, service, listener, stopped, line, breakage), breakage.broken)
        finally:
            await listener.close(is_broken=breakage.broken.done())
            await service.close()
            await _last_tasks()
            log.info("server.stopped", address=address)


async def _live(
    settings: ServerSettings,
    service: Service,
    listener: Listener,
    stopped: asyncio.Event,
    line: dict[str, object],
    breakage: _Breakage,
) -> None:
    """Get ready, serve until `stopped` is set, drain. line: fields of the ready line, which is logged and written to `ready_fd`."""
    if await first_of(_start(service), stopped.wait()):
        return  # The process was stopped before it was ready.
    await listener.say(serves=True)
    log.info("server.ready", **line)
    with Watchdog(service.threads, breakage.by_hanging):
        await asyncio.to_thread(drain_logs)  # A reader who sees this line finds all earlier lines in the log.
        _tell(settings.ready_fd, line, closes=settings.ready_fd != settings.liveness_fd)
        start_spare("omnistage-settle", _settle, again_s=SETTLE_AGAIN_S)
        await stopped.wait()
        log.info("server.draining", grace_s=settings.grace)
        await listener.say(serves=False)
        await service.drain(settings.grace)


async def _start(service: Service) -> None:
    await service.start()
    collect_from_now_on()


def _settle() -> None:
    """Do slow work that keeps nobody waiting, a while after the start. Its thread has the normal priority: while it waits for a CPU it
    holds Python's lock and the kernel's lock on the address space, and on a busy machine a thread of low priority waits for seconds."""
    time.sleep(SETTLE_AFTER_S)
    huge_bytes = use_huge_pages()
    log.debug("memory.huge_pages", mib=huge_bytes >> 20)


async def _last_tasks() -> None:
    """Give gRPC time to notice the end of the calls that were cut off when the server stopped. If the loop ended before, gRPC would log an
    error that is no bug."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others, timeout=LAST_TASKS_S)


class _Breakage:
    """Receives, from any thread, reports of what breaks the process. broken: a future that gets the reason after `service.fail`."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._loop = asyncio.get_running_loop()
        self.broken: asyncio.Future[str] = self._loop.create_future()

    def by_an_error(self, hook: threading.ExceptHookArgs) -> None:
        """Called by threading.excepthook when a thread ends by an error. The process is broken unless the thread is spare."""
        if is_spare(hook.thread):
            log.warning("thread.failed", thread=hook.thread.name if hook.thread else "", exc_info=hook.exc_value)
            return
        self._last_resort()
        thread = hook.thread.name if hook.thread else "unknown"
        log.critical("thread.broken", thread=thread, exc_info=hook.exc_value)
        self._loop.call_soon_threadsafe(self._fail, f"thread {thread} ended by an error")

    def by_hanging(self, thread: Watched, reason: str) -> None:
        """Called by a Watchdog when a thread hangs."""
        self._last_resort()
        log.critical("thread.wedged", thread=thread.name, step=thread.steps, reason=reason)
        if isinstance(thread, EventLoop):  # The loop itself hangs, so it cannot receive the report.
            _exit()
        self._loop.call_soon_threadsafe(self._fail, f"thread {thread.name} hangs: {reason}")

    def by_an_end(self, lasting: asyncio.Future[str]) -> None:
        """Called when LastingTasks.broken is done: a lasting task has ended."""
        if not lasting.cancelled():
            self._last_resort()
            self._fail(lasting.result())

    def _last_resort(self) -> None:
        """Make sure that the process ends within BROKEN_LIMIT_S. Called before everything else, because the rest may hang."""
        timer = threading.Timer(BROKEN_LIMIT_S, _exit)
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError:  # No further thread can be started.
            _exit()

    def _fail(self, reason: str) -> None:
        if not self.broken.done():
            self._service.fail()
            self.broken.set_result(reason)


@contextmanager
def _breakage(service: Service) -> Iterator[_Breakage]:
    """Receive the errors that end threads, and the end of lasting tasks."""
    breakage = _Breakage(service)
    before, threading.excepthook = threading.excepthook, breakage.by_an_error
    service.lasting.broken.add_done_callback(breakage.by_an_end)
    try:
        yield breakage
    finally:
        threading.excepthook = before


async def _unless_broken(life: Coroutine[None, None, None], broken: asyncio.Future[str]) -> None:
    """Run `life` to its end. Raises Broken as soon as `broken` is done."""
    reason = await first_of(asyncio.shield(broken), life)
    if reason is not None:
        raise Broken(reason)


def run(main: Callable[[], Awaitable[None]], ready_fd: int = -1) -> int:
    """Run `main` in an event loop. Returns the exit code: 0, or 1 with the reason on stderr if the server cannot start. A process that
    breaks ends with BROKEN.

    ready_fd: a descriptor that gets one line of JSON, {"error"}, if the server cannot start; negative: none.
    """
    try:
        asyncio.run(_unless_it_breaks(main))
    except StartError as error:
        _tell(ready_fd, {"error": str(error)})
        return cannot_start(error)
    return 0


def cannot_start(error: StartError) -> int:
    """Report the reason, and return the exit code."""
    log.error("server.cannot_start", reason=str(error))
    return 1


async def _unless_it_breaks(main: Callable[[], Awaitable[None]]) -> None:
    """Run `main`. If it raises Broken, end the process at once: asyncio would wait for tasks and threads that may never end."""
    try:
        await main()
    except Broken as error:
        log.critical("server.broken", reason=str(error))
        _exit()


def _exit() -> None:
    """End at once, after the last lines of the log."""
    drain_logs()
    os._exit(BROKEN)


def _metrics(address: str, registry: CollectorRegistry) -> str:
    """Serve the metrics page at HOST:PORT; port 0 takes a free one. Returns its HOST:PORT. Raises StartError."""
    host, port = host_and_port(address)
    try:
        bound = serve_metrics(host, port, registry)
    except OSError as error:
        check_can_listen(address, "--metrics-address")
        raise StartError(f"cannot listen on {address} for metrics: {error.strerror}; choose another --metrics-address") from None
    return f"{address.rpartition(':')[0]}:{bound}"


def _stop_event(lifeline_fd: int) -> asyncio.Event:
    """An event that is set by SIGTERM, by SIGINT, and when the other end of the pipe `lifeline_fd` is closed; negative: no pipe."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for stop_signal in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(stop_signal) is not signal.SIG_IGN:  # A shell ignores SIGINT in jobs in the background.
            loop.add_signal_handler(stop_signal, stopped.set)
    if lifeline_fd >= 0:
        loop.add_reader(lifeline_fd, _lifeline_ended, loop, lifeline_fd, stopped)
    return stopped


def _lifeline_ended(loop: asyncio.AbstractEventLoop, fd: int, stopped: asyncio.Event) -> None:
    if os.read(fd, 1) == b"":
        loop.remove_reader(fd)
        stopped.set()


def _tell(ready_fd: int, line: Mapping[str, object], *, closes: bool = True) -> None:
    """Write a line of JSON to `ready_fd`, and close it if `closes`; do nothing if the number is negative."""
    if ready_fd >= 0:
        with os.fdopen(ready_fd, "w", closefd=closes) as pipe:
            pipe.write(json.dumps(line) + "\n")


S = TypeVar("S", bound=ServerSettings)


def main(name: str, kind: type[S], serve: Callable[[S, Credentials], Awaitable[None]]) -> int:
    """Read the settings and serve until the process is to end. name: the module that `python -m` runs. kind: class of the settings. Returns
    the exit code: 0, or 1 for a server that cannot start. A process that breaks ends with BROKEN."""
    guard_standard_streams()
    try:
        settings = read_settings(kind, sys.argv[1:], f"python -m {name}")
    except StartError as error:
        configure_logs("info", "auto")
        return cannot_start(error)
    configure_logs(settings.log_level, settings.log_format)
    raise_limit()
    return run(lambda: serve(settings, Credentials()), settings.ready_fd)


@asynccontextmanager
async def tracing(url: str, service: str) -> AsyncIterator[Tracer]:
    """A tracer for the life of a process. url: as `--otlp`; empty: spans go nowhere. service: the name under which its spans are found.

    At an orderly end the spans that wait get a moment to be sent; a process that breaks does not wait for that. Raises StartError."""
    if not url:
        yield Tracer()
        return
    try:
        from omnistage.host.otlp import OtlpTracer  # Only now, because OpenTelemetry is an extra.
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "opentelemetry":
            raise
        raise StartError(
            f"--otlp needs packages that are not installed ({error.name} is missing): `make wheels` in a clone, then "
            "pip install --find-links dist 'omnistage[otel]'"
        ) from None
    tracer = OtlpTracer(url, service)
    yield tracer
    await tracer.close()
