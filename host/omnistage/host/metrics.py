"""The Prometheus metrics of a process: a registry that has the metrics of all processes, and the page that shows it, served over HTTP by
threads of its own that end with the process.

The page is at `/metrics` and `/`. `/healthz` says that the process lives: the watchdog ends a process whose event loop hangs. Its gRPC
health says whether it serves."""

from __future__ import annotations

import math
import resource
import socket
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, cast
from wsgiref.simple_server import WSGIRequestHandler, make_server

import structlog
from prometheus_client import CollectorRegistry, Gauge, Info, PlatformCollector, ProcessCollector, disable_created_metrics, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from omnistage.host.background import start_spare
from omnistage.host.child import count_mapped

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment


log = structlog.get_logger(__name__)

UNKNOWN = "unknown"
"""The version of a source tree that is not installed."""


def new_registry() -> CollectorRegistry:
    """A registry with the version, the Python, and the processor time, memory, its bound, and descriptors of this process."""
    # They would tell when each counter was made, which is always when the process began.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    mapped = Gauge("omnistage_process_mapped_bytes", "Memory that this process has mapped, as its bound counts it.", registry=registry)
    mapped.set_function(partial(count_mapped, "self"))
    bound = Gauge("omnistage_process_mapped_max_bytes", "Memory that this process may map; +Inf: no bound.", registry=registry)
    bound.set_function(_memory_bound)
    Info("omnistage_build", "The version that runs.", registry=registry).info({"version": _version()})
    return registry


def _memory_bound() -> float:
    """The bound that `omnistage serve` sets, after the start of a process; read anew for each page."""
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return math.inf if soft == resource.RLIM_INFINITY else soft


def _version() -> str:
    try:
        return version("omnistage")
    except PackageNotFoundError:
        return UNKNOWN


SILENCE_S = 10.0
"""A connection without a request for this long is closed, because each connection holds a thread and a descriptor."""

MAX_VISITORS = 64
"""Largest number of visitors at once. For a further visitor, the visitor that has been silent for longest is closed; if none is silent,
because all have sent a request, the further visitor is closed."""

BACKLOG = 128
"""Connections that the kernel keeps until the server accepts them."""

_PAUSE_S = 1.0

_NEVER_S = 86_400.0
"""Seconds between two checks whether the server must end, which happens only with its process. The default wakes twice a second."""


class _Server(ThreadingWSGIServer):
    """The HTTP server of the page: a thread for each visitor, and at most MAX_VISITORS. A visitor is an open connection."""

    request_queue_size = BACKLOG

    def __init__(self, address: tuple[str, int], handler: Any) -> None:
        """address: host and port. Raises OSError."""
        # The family of the first address.
        self.address_family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        self._silent: dict[socket.socket, None] = {}
        """Visitors that have not sent a request yet, the oldest first. Only the accepting thread adds visitors."""
        self._visitors: set[socket.socket] = set()
        super().__init__(address, handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept the next connection. A connection that cannot be accepted, for example because no descriptor is left, stays in the
        kernel's queue. Without a pause the accepting thread would then try again and again at full speed."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(_PAUSE_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a visitor on a thread of its own, if there is room."""
        if len(self._visitors) >= MAX_VISITORS and not self._leave_oldest():
            self.shutdown_request(request)
            return
        self._visitors.add(request)
        self._silent[request] = None
        thread = start_spare("omnistage-metrics-visitor", partial(self.process_request_thread, request, client_address))
        if thread.ident is None:  # No further thread could be started.
            self.shutdown_request(request)

    def _leave_oldest(self) -> bool:
        """Close the connection that has been silent for longest; its visitor counts no more, and its thread ends soon. Return False if none
        is silent."""
        for oldest in list(self._silent):
            if self._silent.pop(oldest, oldest) is None:  # The value None: it was still there, so it was still silent.
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
                self._visitors.discard(oldest)
                return True
        return False

    def note_request(self, request: socket.socket) -> None:
        """Note that this visitor has sent a request: it is silent no more."""
        self._silent.pop(request, None)

    def shutdown_request(self, request: Any) -> None:
        self._silent.pop(request, None)
        self._visitors.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.warning("metrics.failed", exc_info=sys.exc_info()[1])


class _Handler(WSGIRequestHandler):
    """The handler of one visitor's connection."""

    timeout = SILENCE_S

    def handle(self) -> None:
        with suppress(OSError):  # The visitor was silent, or went away.
            super().handle()

    def parse_request(self) -> bool:
        is_one = super().parse_request()
        cast(_Server, self.server).note_request(self.request)
        return is_one

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the log is for this process, not for visitors of the page."""


def serve_metrics(host: str, port: int, registry: CollectorRegistry) -> int:
    """Serve the page from now on, on threads of its own. Returns the port. host: without brackets. port: 0 takes a free one. Raises OSError
    if this process cannot listen there."""
    server = make_server(host, port, _app(registry), _Server, _Handler)
    start_spare("omnistage-metrics", partial(server.serve_forever, _NEVER_S), again_s=_PAUSE_S)
    return server.server_port


def _app(registry: CollectorRegistry) -> WSGIApplication:
    """The page as a WSGI application."""
    page = make_wsgi_app(registry)
    plain = [("Content-Type", "text/plain; charset=utf-8")]

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        match environ["PATH_INFO"]:
            case "/metrics" | "/":
                shown: Iterable[bytes] = page(environ, start_response)
                return shown
            case "/healthz":
                start_response("200 OK", plain)
                return [b"ok\n"]
        start_response("404 Not Found", plain)
        return [b"there are /metrics and /healthz\n"]

    return app
