"""Downloads a file. A download that breaks off is continued where it stopped, by this process or a later process."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import httpx2

from omnistage.models.reports import FetchError, bytes_told

CONNECT_S = 10.0
SILENCE_S = 30.0
"""If a server sends nothing for this many seconds, this counts as a break."""

BREAKS = 5
"""After each of this many breaks, a call continues the download; after a further break it gives up."""

PAUSE_S = 1.0
"""Seconds of the pause after the first break; each further pause is this much longer."""

_RANGE = re.compile(r"bytes (?P<first>\d+)-\d+/(?P<size>\d+|\*)")

Came = Callable[[int, int | None], None]
"""Called as bytes come, with the number of bytes so far and the size of the file in bytes (None: the server does not report it)."""


class Undownloadable(Exception):
    """The server cannot be reached, or refuses the file; another way to the file may exist. The partial file is unchanged."""


def download(url: str, partial: Path, max_bytes: int, report: Came) -> None:
    """Begin or continue a partial file until it is complete. The caller must check that it is the right file. max_bytes: of the file.
    report: called with the progress. Raises Undownloadable; FetchError if the connection breaks too often (received bytes are kept), or if
    more than `max_bytes` came."""
    with _client() as client, partial.open("ab") as file:
        target = _Target(file, max_bytes, report)
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
    """A client that uses the certificates and proxies named by environment variables. Raises Undownloadable if they cannot be used."""
    try:
        # Uncompressed: a compressed transfer has no ranges, and its bytes do not have the hash of the file.
        return httpx2.Client(
            follow_redirects=True, timeout=httpx2.Timeout(SILENCE_S, connect=CONNECT_S), headers={"Accept-Encoding": "identity"}
        )
    except (OSError, ValueError, ImportError, httpx2.InvalidURL) as error:
        raise Undownloadable(f"the environment names certificates or proxies that cannot be used: {error}") from error


class _Refused(Exception):
    """The server's answer is not the file."""


class _Target:
    """A partial file to which a download appends. position: bytes in it. has_grown: whether bytes were added since it was opened.
    max_bytes: of the file. report: called with the progress, see `Came`."""

    def __init__(self, file: BinaryIO, max_bytes: int, report: Came) -> None:
        self.position = file.tell()
        self.has_grown = False
        self._file = file
        self._max_bytes = max_bytes
        self._report = report

    def fill(self, client: httpx2.Client, url: str) -> None:
        """Request the missing bytes and append them. If the server cannot send only these, empty the file and request all bytes."""
        while not self._fill(client, url):
            self._empty()

    def _fill(self, client: httpx2.Client, url: str) -> bool:
        """One try of `fill`. Returns whether the file is complete; False: the server cannot send the requested range. Raises _Refused."""
        headers = {"Range": f"bytes={self.position}-"} if self.position else {}
        with client.stream("GET", url, headers=headers) as answer:
            if answer.headers.get("Content-Encoding", "identity") != "identity":
                raise _Refused(f"it comes as {answer.headers['Content-Encoding']}")
            sent_range = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
            match answer.status_code:
                case 200:
                    self._empty()
                    size = answer.headers.get("Content-Length", "")
                case 206 if self.position and sent_range is not None and int(sent_range["first"]) == self.position:
                    size = sent_range["size"]
                case 206 | 416 if self.position:
                    return False
                case status:
                    raise _Refused(f"status {status}")
            total = int(size) if size.isdecimal() else None
            self._report(self.position, total)
            for block in answer.iter_raw():
                self._write(block)
                self._report(self.position, total)
        return True

    def _write(self, block: bytes) -> None:
        """Append bytes. If the file would have more than `max_bytes`, empties it and raises FetchError."""
        if self.position + len(block) > self._max_bytes:
            self._empty()
            raise FetchError(
                f"more than {bytes_told(self._max_bytes)} came, which cannot be the right file: check the package index that pip is"
                " configured to use"
            )
        self._file.write(block)
        self._file.flush()
        self.position += len(block)
        self.has_grown = True

    def _empty(self) -> None:
        self._file.truncate(0)
        self.position = 0
