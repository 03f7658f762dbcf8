"""A package index on a loopback port, as pip asks it, that notes down what was asked; its files are at another origin, as at real ones."""

from __future__ import annotations

import base64
import hashlib
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest

from helpers.http_servers import Handler, running


@dataclass(frozen=True)
class CutAnswer:
    """An answer that ends after some bytes of its file. stays: the connection is not closed, but silent until it is over."""

    after: int
    stays: bool = False


class PackageIndex:
    """An index of packages. It has files by name, and behaves as its fields say.

    asked: the path and the range of each request; no range: all of it. login: the name:password that a client needs for anything; empty:
    none, and its links lead to the storage. stops: the places where answers with a whole file, or with the rest of one, stop, each once, in
    order."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[tuple[str, str]] = []
        self.login = ""
        self.stops: dict[str, list[CutAnswer]] = {}
        self.over = threading.Event()
        self.address = ""
        self.storage = ""

    def ranges(self, name: str) -> list[str]:
        """The ranges of a wheel that were asked for; empty: the whole wheel."""
        return [part for path, part in self.asked if path == f"/files/{name}"]

    def environment(self) -> dict[str, str]:
        login = f"{self.login}@" if self.login else ""
        return {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": f"http://{login}{self.address}/simple/"}

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make it the only source of pip, here and in processes that are started."""
        for name in [name for name in os.environ if name.startswith("PIP_")]:
            monkeypatch.delenv(name)
        for name, value in self.environment().items():
            monkeypatch.setenv(name, value)


@contextmanager
def package_index() -> Iterator[PackageIndex]:
    index = PackageIndex()
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), type("_HandlerOfIndex", (_Handler,), {"index": index})) for _ in range(2)]
    with running(servers, index.over) as ports:
        index.address, index.storage = (f"127.0.0.1:{port}" for port in ports)
        yield index


class _Handler(Handler):
    index: PackageIndex

    def handle(self) -> None:
        with suppress(ConnectionError):  # the client was killed
            super().handle()

    def answer(self) -> None:
        index, path = self.index, urlsplit(self.path).path
        index.asked.append((path, self.headers.get("Range", "")))
        if index.login and self.headers.get("Authorization", "") != f"Basic {base64.b64encode(index.login.encode()).decode()}":
            return self.send(401, b"", {"WWW-Authenticate": "Basic"})
        folder, _, name = path.strip("/").rpartition("/")
        if folder == "simple":
            return self.send(200, self._links(name).encode(), {"Content-Type": "text/html"})
        wheel = index.files.get(name)
        if folder != "files" or wheel is None:
            return self.send(404, b"", {})
        return self._file(name, wheel)

    def _links(self, package: str) -> str:
        index = self.index
        place = "../../files" if index.login else f"http://{index.storage}/files"
        return "\n".join(
            f'<a href="{place}/{name}#sha256={hashlib.sha256(content).hexdigest()}">{name}</a>'
            for name, content in index.files.items()
            if name.partition("-")[0].replace("_", "-") == package
        )

    def _file(self, name: str, content: bytes) -> None:
        stops, range_text = self.index.stops.get(name, []), self.headers.get("Range", "")
        first = int(range_text.removeprefix("bytes=").removesuffix("-")) if range_text else 0
        headers = {"Accept-Ranges": "bytes"} | ({"Content-Range": f"bytes {first}-{len(content) - 1}/{len(content)}"} if first else {})
        stop = stops.pop(0) if stops else None
        self.send(206 if first else 200, content[first:], headers, None if stop is None else stop.after - first)
        if stop is not None:
            if stop.stays:
                self.index.over.wait()
            self.close_connection = True
            with suppress(OSError):  # the client has left
                self.connection.shutdown(socket.SHUT_RDWR)
