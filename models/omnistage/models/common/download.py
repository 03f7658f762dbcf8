"""A download of a file that goes on from where it stopped, in this process or in an earlier one."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import httpx2

from omnistage.models.errors import FetchError
from omnistage.models.humans import bytes_told

CONNECT_S = 10.0
SILENCE_S = 30.0
"""Seconds of silence of a server that count as a break."""

BREAKS = 5
"""How many times one call goes on after a break."""

PAUSE_S = 1.0
"""Pause before the call goes on for the first time; each further pause is longer by as much."""

_RANGE = re.compile(r"bytes (?P<first>\d+)-\d+/(?P<size>\d+|\*)")

Came = Callable[[int, int | None], None]
"""Called as bytes come, with the number of bytes that are there and of all bytes of the file; None: the server does not tell."""


class Undownloadable(Exception):
    """The server was not reached, or does not give us the file; there may be another way to it. The partial file is unchanged."""


def download(url: str, partial: Path, most: int, came: Came) -> None:
    """Complete a partial file, or begin it. The caller must check that it is the right file. most: most bytes of the file.

    Raises Undownloadable; raises FetchError if the connection breaks too often, with the received bytes kept, or if too much came."""
    with _client() as client, partial.open("ab") as file:
        target = _Target(file, most, came)
        for number in range(1 + BREAKS):
            time.sleep(PAUSE_S * number)
            try:
                return target.fill(client, url)
            except (httpx2.HTTPError, httpx2.InvalidURL, _Refused) as error:
                if not target.has_grown:
                    raise Undownloadable(f"{url}: {error}") from error
                last = error
        raise FetchError(
            f"the connection to {httpx2.URL(url).host} broke off {1 + BREAKS} times ({last}): check the network and try again;"
            f" {bytes_told(target.position)} are there and are kept"
        ) from last


def _client() -> httpx2.Client:
    """A client with the certificates and proxies of the environment."""
    try:
        # Compressed transfer has no ranges, and its bytes do not fit the hash.
        return httpx2.Client(
            follow_redirects=True, timeout=httpx2.Timeout(SILENCE_S, connect=CONNECT_S), headers={"Accept-Encoding": "identity"}
        )
    except (OSError, ValueError, ImportError, httpx2.InvalidURL) as error:
        raise Undownloadable(f"the environment names certificates or proxies that cannot be used: {error}") from error


class _Refused(Exception):
    """An answer that is not the file."""


class _Target:
    """A partial file to which a download appends. position: bytes in it. has_grown: whether any bytes came since it was opened. most: bytes
    that it may have in all. came: see `Came`."""

    def __init__(self, file: BinaryIO, most: int, came: Came) -> None:
        self.position = file.tell()
        self.has_grown = False
        self._file = file
        self._most = most
        self._came = came

    def fill(self, client: httpx2.Client, url: str) -> None:
        """Request the missing bytes and write them. A server that cannot send only these is asked for the whole file."""
        while not self._fill(client, url):
            self._empty()

    def _fill(self, client: httpx2.Client, url: str) -> bool:
        """Request the missing bytes. False: the server has no such range."""
        headers = {"Range": f"bytes={self.position}-"} if self.position else {}
        with client.stream("GET", url, headers=headers) as answer:
            if answer.headers.get("Content-Encoding", "identity") != "identity":
                raise _Refused(f"it comes as {answer.headers['Content-Encoding']}")
            part = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
            match answer.status_code:
                case 200:
                    self._empty()
                    size = answer.headers.get("Content-Length", "")
                case 206 if self.position and part is not None and int(part["first"]) == self.position:
                    size = part["size"]
                case 206 | 416 if self.position:
                    return False
                case status:
                    raise _Refused(f"status {status}")
            total = int(size) if size.isdecimal() else None
            self._came(self.position, total)
            for block in answer.iter_raw():
                self._write(block)
                self._came(self.position, total)
        return True

    def _write(self, block: bytes) -> None:
        """Append bytes. If there are more than `most`, empties the file and raises FetchError."""
        if self.position + len(block) > self._most:
            self._empty()
            raise FetchError(
                f"more than {bytes_told(self._most)} came, which cannot be the right file: check the package index that pip is"
                " configured to use"
            )
        self._file.write(block)
        self._file.flush()
        self.position += len(block)
        self.has_grown = True

    def _empty(self) -> None:
        self._file.truncate(0)
        self.position = 0
