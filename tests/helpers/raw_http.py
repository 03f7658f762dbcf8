"""HTTP by hand: bytes to a gateway, and what comes back."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import Any

LIMIT_S = 60.0

CHAT = "/v1/chat/completions"

QUESTION = {"model": "toy", "messages": [{"role": "user", "content": "Hello"}], "seed": 5, "max_tokens": 4}


@dataclass(frozen=True)
class HttpAnswer:
    """An answer. headers: by their names in lower case. status: 0 where the connection was closed without one."""

    status: int = 0
    headers: Mapping[str, str] | None = None
    body: bytes = b""

    @property
    def error(self) -> dict[str, Any]:
        told = json.loads(self.body)
        assert set(told) == {"error"} and {"message", "type", "param", "code"} <= set(told["error"]), told
        error: dict[str, Any] = told["error"]
        assert error["reason"], error
        assert error["message"] and error["type"] == ("server_error" if self.status >= 500 else "invalid_request_error"), error
        return error

    def header(self, name: str) -> str | None:
        return (self.headers or {}).get(name)


def head(method: str, path: str, headers: Mapping[str, str], *, version: str = "1.1") -> bytes:
    lines = [f"{method} {path} HTTP/{version}", *(f"{name}: {value}" for name, value in headers.items())]
    return "".join(f"{line}\r\n" for line in [*lines, ""]).encode("latin-1")


def post(body: object = QUESTION, path: str = CHAT, **headers: str) -> bytes:
    """A request with this body, as it is or as JSON. headers: beside the usual ones; _ in a name is written as -."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return (
        head("POST", path, {"Host": "localhost", "Content-Type": "application/json", "Content-Length": str(len(content)), **given})
        + content
    )


@contextmanager
def connected(url: str, source: str = "127.0.0.1") -> Iterator[socket.socket]:
    """A connection to the gateway there. source: the address to call from."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), LIMIT_S, (source, 0)) as connection:
        yield connection


def heard(connection: socket.socket, method: str = "GET") -> HttpAnswer:
    """The next answer there; one that was broken off counts as none."""
    response = HTTPResponse(connection, method=method)
    try:
        response.begin()
        body = response.read()
    except (HTTPException, ConnectionError):
        return HttpAnswer()
    return HttpAnswer(response.status, {name.lower(): value for name, value in response.getheaders()}, body)


def answer(url: str, *pieces: bytes, method: str = "GET", source: str = "127.0.0.1") -> HttpAnswer:
    """The answer to these bytes on a connection of its own. source: the address of the caller. method: HEAD, where the answer has no
    body."""
    with connected(url, source) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
        except ConnectionError:  # It was refused before all was sent, and may be told so.
            pass
        return heard(connection, method)
