"""A package index on a loopback port, as pip asks it, that notes down what was asked; its files are at another origin, as at real ones."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import socket
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from io import BytesIO
from urllib.parse import urlsplit

import pytest

from helpers.http_servers import Handler, running

RANGE = re.compile(r"bytes=(?P<first>\d*)-(?P<last>\d*)")


@dataclass(frozen=True)
class CutAnswer:
    """An answer that ends after some bytes of its file. stays: the connection is not closed, but silent until it is over."""

    after: int
    stays: bool = False


@dataclass(frozen=True)
class IndexRequest:
    """One request. range: as it was asked for, empty: none. agent: what asks, "pip" or another program."""

    method: str
    path: str
    range: str
    agent: str


class PackageIndex:
    """An index of packages. It has files by name, records the requests, and behaves as its fields say.

    has_metadata: the index gives the metadata of a wheel in a file beside it. has_ranges: files can be had in parts. is_shifted: parts
    begin one byte too early. has_sizes: the index gives the size of a file. has_redirects: its links lead to the storage by a redirection.
    login: the name:password that a client needs for anything; empty: none. stops: the places where answers with a whole file, or with the
    rest of one, stop, each once, in order. hashes: the hashes that it gives for files in place of the true ones; empty: it gives none."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[IndexRequest] = []
        self.has_metadata = True
        self.has_ranges = True
        self.is_shifted = False
        self.has_sizes = True
        self.has_redirects = True
        self.login = ""
        self.stops: dict[str, list[CutAnswer]] = {}
        self.hashes: dict[str, str] = {}
        self.over = threading.Event()
        self.address = ""
        self.storage = ""

    def add(self, name: str, content: bytes) -> str:
        """A wheel; its sha256."""
        self.files[name] = content
        return hashlib.sha256(content).hexdigest()

    def gets(self, name: str) -> list[IndexRequest]:
        """How a wheel was asked for, by programs other than pip."""
        return [asked for asked in self.asked if asked.method == "GET" and asked.path == f"/files/{name}" and asked.agent != "pip"]

    def by_pip(self, name: str) -> int:
        return sum(
            asked.method == "GET" and asked.path == f"/files/{name}" and asked.agent == "pip" and not asked.range for asked in self.asked
        )

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
        agent = self.headers["User-Agent"].partition("/")[0]
        index.asked.append(IndexRequest(self.command, path, self.headers.get("Range", ""), agent))
        if index.login and self.headers.get("Authorization", "") != f"Basic {base64.b64encode(index.login.encode()).decode()}":
            return self._send(401, b"", {"WWW-Authenticate": "Basic"})
        folder, _, name = path.strip("/").rpartition("/")
        wheel = index.files.get(name.removesuffix(".metadata"))
        if folder == "simple":
            return self._send(200, self._links(name).encode(), {"Content-Type": "text/html"})
        if folder not in ("moved", "files") or wheel is None:
            return self._send(404, b"", {})
        if folder == "moved":
            return self._send(302, b"", {"Location": f"http://{index.storage}/files/{name}"})
        if name.endswith(".metadata"):
            return self._send(200, _metadata(wheel), {})
        return self._file(name, wheel)

    def _links(self, package: str) -> str:
        index, links = self.index, list[str]()
        for name, content in index.files.items():
            if name.partition("-")[0].replace("_", "-") == package:
                said = index.hashes.get(name, hashlib.sha256(content).hexdigest())
                beside = f' data-core-metadata="sha256={hashlib.sha256(_metadata(content)).hexdigest()}"' if index.has_metadata else ""
                folder = "moved" if index.has_redirects else "files"
                links.append(f'<a href="../../{folder}/{name}{f"#sha256={said}" if said else ""}"{beside}>{name}</a>')
        return "\n".join(links)

    def _file(self, name: str, content: bytes) -> None:
        index, size = self.index, len(content)
        asked = RANGE.fullmatch(self.headers.get("Range", "")) if index.has_ranges else None
        first, last = 0, size - 1
        if asked is not None and asked["first"]:
            first, last = int(asked["first"]), min(int(asked["last"] or last), last)
        elif asked is not None:
            first = max(0, size - int(asked["last"]))
        if first > last:
            return self._send(416, b"", {"Content-Range": f"bytes */{size}"})
        headers = {"Accept-Ranges": "bytes"} if index.has_ranges else {}
        if asked is not None:
            first = max(0, first - 1) if index.is_shifted else first
            headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        stops = index.stops.get(name, []) if self.command == "GET" and last == size - 1 else []
        stop = stops.pop(0) if stops else None
        self._send(200 if asked is None else 206, content[first : last + 1], headers, None if stop is None else stop.after - first)
        if stop is not None:
            if stop.stays:
                index.over.wait()
            self.close_connection = True
            with suppress(OSError):  # the client has left
                self.connection.shutdown(socket.SHUT_RDWR)
        return None

    def _send(self, status: int, body: bytes, headers: Mapping[str, str], most: int | None = None) -> None:
        self.send(status, body, headers, most, has_size=self.index.has_sizes or status >= 300)


def _metadata(wheel: bytes) -> bytes:
    with zipfile.ZipFile(BytesIO(wheel)) as opened:
        return opened.read(next(name for name in opened.namelist() if name.endswith(".dist-info/METADATA")))
