"""A hub of models on a loopback port that speaks the few routes that huggingface_hub asks, and notes down what was asked.

Small files come from the hub itself. Large ones, as at the real ones, from a storage at another origin that the hub points to."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from helpers.http_servers import Handler, running
from helpers.processes import StartedProcess

LARGE = (".safetensors", ".bin", ".pt")
REPOSITORY = r"(?P<name>[^/]+/[^/]+)"
ROUTES = {
    "info": re.compile(rf"/api/models/{REPOSITORY}(?:/revision/(?P<revision>[^/]+))?"),
    "tree": re.compile(rf"/api/models/{REPOSITORY}/tree/(?P<revision>[^/]+)"),
    "resolve": re.compile(rf"/{REPOSITORY}/resolve/(?P<revision>[^/]+)/(?P<path>.+)"),
    "stored": re.compile(r"/stored/(?P<sha256>[0-9a-f]{64})"),
}


@dataclass(frozen=True)
class File:
    """content: bytes, or a file of this machine. told_size: what the hub says of it, where that is not true."""

    content: bytes | Path
    told_size: int | None = None

    @cached_property
    def data(self) -> bytes:
        return self.content if isinstance(self.content, bytes) else self.content.read_bytes()

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def size(self) -> int:
        return len(self.data) if self.told_size is None else self.told_size

    @cached_property
    def oid(self) -> str:
        """As git names it."""
        return hashlib.sha1(b"blob %d\0" % len(self.data) + self.data).hexdigest()


@dataclass
class Repository:
    """commits: their files by path. refs: branches and tags. token: who sees it at all, empty: everybody. gate: who gets its files. told:
    what is said of a file in its lists, by path, or of itself, by the empty path, in place of what is so."""

    commits: dict[str, dict[str, File]]
    refs: dict[str, str] = field(default_factory=dict)
    token: str = ""
    gate: str = ""
    told: Mapping[str, Mapping[str, object]] = field(default_factory=dict)


@dataclass(frozen=True)
class HubRequest:
    """One request. host: "hub" or "storage". what: the file, or the route of the API. range: as it was asked for, empty: none."""

    host: str
    method: str
    what: str
    range: str
    token: str
    agent: str


class HubServer:
    """A hub. It records the requests, and says what it has by name and how it fails.

    cut: files that end too early, by path: after how many bytes, each once. stall: the same, but the connection stays, and silent. damaged:
    files that come with other bytes. page: what the server answers in place of all answers; None: as they are. drips: that page comes byte
    by byte. status: the status of all answers; 0: as they are."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.asked: list[HubRequest] = []
        self.cut: dict[str, int] = {}
        self.stall: dict[str, int] = {}
        self.damaged: set[str] = set()
        self.page: bytes | None = None
        self.drips = False
        self.status = 0
        self.over = threading.Event()
        self.endpoint = ""
        self.storage = ""

    def add(self, name: str, files: Mapping[str, File], *, token: str = "", gate: str = "") -> str:
        """A repository of one commit, or one more commit of it; `main` is the newest. The commit."""
        commit = hashlib.sha1(repr([(path, file.sha256) for path, file in sorted(files.items())]).encode()).hexdigest()
        repository = self.repositories.setdefault(name, Repository({}, token=token, gate=gate))
        repository.commits[commit] = dict(files)
        repository.refs["main"] = commit
        return commit

    def fetched(self) -> list[str]:
        """The files whose bytes were asked for, in order."""
        return [asked.what for asked in self.asked if asked.method == "GET" and not asked.what.startswith("api ")]

    def environment(self, home: Path) -> dict[str, str]:
        return {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(home)}


@contextmanager
def hub_server() -> Iterator[HubServer]:
    hub = HubServer()
    servers = [
        ThreadingHTTPServer(("127.0.0.1", 0), type("_HandlerOfHost", (_Handler,), {"hub": hub, "host": host}))
        for host in ("hub", "storage")
    ]
    with running(servers, hub.over) as ports:
        hub.endpoint, hub.storage = (f"http://127.0.0.1:{port}" for port in ports)
        yield hub


FETCHING = """
import json, sys
from dataclasses import asdict
from omnistage.models.fetch.hub import fetch, hub_name
from omnistage.models.reports import show_nothing
from omnistage.models.reports import LoadError
for text in sys.argv[1:]:
    told, checked = [], []
    check = lambda folder: checked.append(any(folder.rglob("*.safetensors")))
    try:
        folder = fetch(hub_name(text), check, told.append, show_nothing)
        said = {"commit": folder.name, "folder": str(folder)}
    except LoadError as error:
        said = {"error": type(error).__name__, "text": str(error)}
    plans = [{**asdict(plan), "name": str(plan.name), "cache": str(plan.cache)} for plan in told]
    print(json.dumps({**said, "plans": plans, "had_weights": checked}), flush=True)
"""
"""A program that fetches names, one after the other, and tells of each in a line. A process of its own, since huggingface_hub reads its
variables once."""


def fetching(environment: Mapping[str, str], *names: str, list_limit_s: float | None = None) -> StartedProcess[str]:
    """That program. environment: in place of all variables that steer huggingface_hub. list_limit_s: as in `fetched`."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    limit = "" if list_limit_s is None else f"import omnistage.models.fetch.hub; omnistage.models.fetch.hub.LIST_LIMIT_S = {list_limit_s}\n"
    command = [sys.executable, "-c", limit + FETCHING, *names]
    return StartedProcess(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**others, **environment})


def fetched(environment: Mapping[str, str], *names: str, list_limit_s: float | None = None) -> list[dict[str, Any]]:
    """Fetches each name, and returns what the program tells of it. The program writes nothing to stderr. list_limit_s: in place of
    LIST_LIMIT_S."""
    with fetching(environment, *names, list_limit_s=list_limit_s) as run:
        out, err = run.communicate(timeout=60)
    assert (run.returncode, err) == (0, "")
    return [json.loads(line) for line in out.splitlines()]


class _Handler(Handler):
    hub: HubServer
    host: str

    def answer(self) -> None:
        hub, path = self.hub, urlsplit(self.path).path
        matches = {route: match for route, pattern in ROUTES.items() if (match := pattern.fullmatch(path))}
        if not matches:
            self._note(f"api {path}")
            return self._refuse(404, "")
        ((route, match),) = matches.items()
        found = {key: unquote(value) for key, value in match.groupdict().items() if value is not None}
        if route == "stored":
            return self._stored(found["sha256"])
        self._note(found.get("path", f"api {route}"))
        if hub.page is not None:
            return self._drip(hub.page) if hub.drips else self.send(200, hub.page, {"Content-Type": "text/html"})
        if hub.status:
            return self._refuse(hub.status, "")
        repository = hub.repositories.get(found["name"])
        if repository is None or repository.token not in ("", self._token()):
            return self._refuse(401, "RepoNotFound")
        revision = found.get("revision", "main")
        commit = repository.refs.get(revision, revision)
        if commit not in repository.commits:
            return self._refuse(404, "RevisionNotFound")
        if route != "info" and repository.gate not in ("", self._token()):
            return self._refuse(403, "GatedRepo")
        files = repository.commits[commit]
        if route == "resolve":
            return self._resolve(commit, found["path"], files)
        list_of = _siblings if route == "info" else _entries
        entries = [{**entry, **repository.told.get(path, {})} for path, entry in list_of(files).items()]
        told = {**_info(found["name"], commit, entries), **repository.told.get("", {})} if route == "info" else entries
        return self.send(200, json.dumps(told).encode(), {"Content-Type": "application/json"})

    def _resolve(self, commit: str, path: str, files: Mapping[str, File]) -> None:
        file = files.get(path)
        if file is None:
            return self._refuse(404, "EntryNotFound", {"X-Repo-Commit": commit})
        headers = {"X-Repo-Commit": commit, "ETag": f'"{file.oid}"'}
        if path.endswith(LARGE):
            headers |= {"X-Linked-Etag": f'"{file.sha256}"', "X-Linked-Size": str(file.size)}
            return self.send(302, b"", {**headers, "Location": f"{self.hub.storage}/stored/{file.sha256}"})
        return self.send(200, file.data, headers)

    def _stored(self, sha256: str) -> None:
        hub = self.hub
        all_files = [entry for repository in hub.repositories.values() for files in repository.commits.values() for entry in files.items()]
        path, file = next(entry for entry in all_files if entry[1].sha256 == sha256)
        self._note(path)
        first = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").removesuffix("-"))
        headers = {"ETag": f'"{sha256}"', "Accept-Ranges": "bytes"}
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(file.data) - 1}/{len(file.data)}"
        cut, stall = hub.cut.pop(path, None), hub.stall.pop(path, None)
        data = file.data[first:]
        if path in hub.damaged:
            data = bytes(len(data))
        self.send(206 if first else 200, data, headers, cut if stall is None else stall)
        if stall is not None:
            hub.over.wait()
        if cut is not None or stall is not None:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

    def _note(self, what: str) -> None:
        asked = HubRequest(self.host, self.command, what, self.headers.get("Range", ""), self._token(), self.headers["User-Agent"])
        self.hub.asked.append(asked)

    def _token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def _drip(self, body: bytes) -> None:
        """A byte every tenth of a second, until the client or the test has ended."""
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with suppress(ConnectionError):
            for value in body:
                self.wfile.write(bytes([value]))
                if self.hub.over.wait(0.1):
                    return

    def _refuse(self, status: int, code: str, headers: Mapping[str, str] | None = None) -> None:
        body = json.dumps({"error": "Refused\nin two lines."}).encode()
        self.send(status, body, {**(headers or {}), "Content-Type": "application/json", **({"X-Error-Code": code} if code else {})})


def _info(name: str, commit: str, siblings: list[dict[str, object]]) -> dict[str, object]:
    return {"_id": "1", "id": name, "modelId": name, "sha": commit, "siblings": siblings, "private": False, "tags": [], "downloads": 0}


def _siblings(files: Mapping[str, File]) -> dict[str, dict[str, object]]:
    return {
        path: {"rfilename": path, "size": file.size, "blobId": file.oid} | _of_large(path, file, "sha256") for path, file in files.items()
    }


def _entries(files: Mapping[str, File]) -> dict[str, dict[str, object]]:
    return {
        path: {"type": "file", "path": path, "size": file.size, "oid": file.oid} | _of_large(path, file, "oid")
        for path, file in files.items()
    }


def _of_large(path: str, file: File, digest: str) -> dict[str, object]:
    return {"lfs": {digest: file.sha256, "size": file.size, "pointerSize": 134}} if path.endswith(LARGE) else {}
