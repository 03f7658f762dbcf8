"""A server of https on a loopback port, by an authority of its own, that gives what a test lays there."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from helpers.http_servers import running

Answer = Callable[[BaseHTTPRequestHandler], None]


@dataclass
class Web:
    """authority: the file with its certificate. places: by path, what answers; what is asked for elsewhere is not there. asked: paths.
    over: set at its end, for what still waits in it."""

    authority: Path
    port: int = 0
    places: dict[str, Answer] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def lay(self, path: str, data: bytes, media_type: str = "application/octet-stream") -> None:
        """Lays data at a path."""

        def answer(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(200)
            handler.send_header("Content-Type", media_type)
            handler.send_header("Content-Length", str(len(data)))
            handler.end_headers()
            handler.wfile.write(data)

        self.places[path] = answer

    def send_on(self, path: str, to: str) -> None:
        """Sends each client that asks for a path on to another one."""

        def answer(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(302)
            handler.send_header("Location", to)
            handler.send_header("Content-Length", "0")
            handler.end_headers()

        self.places[path] = answer


@contextmanager
def web(folder: Path) -> Iterator[Web]:
    """One for 127.0.0.1 and localhost. A test that asks for it is skipped where nothing makes certificates."""
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command, which makes the certificate, is not installed")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=a web of tests", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    subprocess.run([*command, *names, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True, timeout=60)
    told = Web(certificate)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 30

        def do_GET(self) -> None:
            told.asked.append(self.path)
            answer = told.places.get(self.path)
            if answer is None:
                self.send_error(404)
            else:
                answer(self)

        def log_message(self, format: str, *args: object) -> None:
            return

    trust = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trust.load_cert_chain(certificate, key)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    # Each connection shakes hands on its own thread: one that does not would keep the others out.
    server.socket = trust.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    told.port = server.server_address[1]
    with running([server], told.over):
        yield told
