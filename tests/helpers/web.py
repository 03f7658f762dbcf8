"""A server of https on a loopback port, by an authority of its own, that gives what a test lays there."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from helpers.http_servers import Handler, running

Answer = Callable[[Handler], None]


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

        self.places[path] = lambda handler: handler.send(200, data, {"Content-Type": media_type})

    def send_on(self, path: str, to: str) -> None:

        self.places[path] = lambda handler: handler.send(302, b"", {"Location": to})


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

    class PlacesHandler(Handler):
        timeout = 30

        def answer(self) -> None:
            told.asked.append(self.path)
            told.places.get(self.path, lambda handler: handler.send_error(404))(self)

    trust = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trust.load_cert_chain(certificate, key)
    server = ThreadingHTTPServer(("127.0.0.1", 0), PlacesHandler)
    # Each connection shakes hands on its own thread: one that does not would keep the others out.
    server.socket = trust.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    told.port = server.server_address[1]
    with running([server], told.over):
        yield told
