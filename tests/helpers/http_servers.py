"""HTTP servers of one test on loopback ports, each on a thread, from `with` to its end; and how a handler of theirs answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BLOCK = 1 << 20


class Handler(BaseHTTPRequestHandler):
    """`answer` answers GET and HEAD. Nothing goes to stderr."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        return

    def do_GET(self) -> None:
        self.answer()

    def do_HEAD(self) -> None:
        self.answer()

    def answer(self) -> None:
        raise NotImplementedError

    def send(self, status: int, body: bytes, headers: Mapping[str, str], most: int | None = None) -> None:
        """most: bytes of the body that are really sent."""
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            try:
                for first in range(0, len(body[:most]), BLOCK):
                    self.wfile.write(body[:most][first : first + BLOCK])
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True  # The client has left.


@contextmanager
def running(servers: Sequence[ThreadingHTTPServer], over: threading.Event) -> Iterator[list[int]]:
    """Their ports. over: set at the end, before they are shut down, for requests that still wait in them."""
    threads = [threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield [server.server_port for server in servers]
    finally:
        over.set()
        for server in servers:
            server.shutdown()
            server.server_close()
        for thread in threads:
            thread.join()
