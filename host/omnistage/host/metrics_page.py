"""The page of a process's Prometheus metrics, served over HTTP by threads of its own that end with the process.

`/metrics` and `/` have it. `/healthz` says that the process lives: one whose event loop hangs is ended by its watchdog. Whether it serves
is said by its gRPC health.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

SILENCE_S = 10.0
"""A connection on which nobody asks for so long is closed: each one holds a thread and a descriptor."""

_PAUSE_S = 1.0

_NEVER_S = 86_400.0
"""Between two looks whether the server is to end, which it does with its process: by default it wakes twice a second for that."""


class _Server(ThreadingWSGIServer):
    def get_request(self) -> tuple[socket.socket, Any]:
        """The next connection. One that cannot be taken, as when no descriptor is left, stays in the kernel's queue: without a pause its
        thread would try again and again, and compute for nothing."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(_PAUSE_S)
            raise


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = SILENCE_S

    def handle(self) -> None:
        with suppress(OSError):  # It was silent, or went away.
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        """The log is for what happens here, not for who looks."""


def serve_metrics(host: str, port: int, registry: CollectorRegistry) -> int:
    """Serve from now on; the port. host: without brackets. Raises OSError where nobody can listen there."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    kind = _Server6 if family is socket.AF_INET6 else _Server
    server = make_server(host, port, _app(registry), kind, _Handler)
    threading.Thread(target=server.serve_forever, args=(_NEVER_S,), name="omnistage-metrics", daemon=True).start()
    return server.server_port


def _app(registry: CollectorRegistry) -> WSGIApplication:
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
