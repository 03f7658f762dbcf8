"""Keeps values for a while under names that nobody can guess: pictures with URLs, the texts of earlier sounds."""

from __future__ import annotations

import secrets
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

KEPT_S = 3600.0
"""Seconds that a value is kept by default."""


def new_name(prefix: str = "") -> str:
    """A name that nobody can guess."""
    return f"{prefix}{secrets.token_urlsafe(24)}"


@dataclass(frozen=True, slots=True)
class _Entry(Generic[T]):
    value: T
    host: str
    size: int
    expires_at: float


class ExpiringCache(Generic[T]):
    """Keeps at most `most_bytes` bytes of values, each for `kept_s` seconds. If there are more, the oldest of the host with the most bytes
    is dropped: nobody makes what is kept for others go."""

    def __init__(self, most_bytes: int, kept_s: float = KEPT_S) -> None:
        self._most_bytes, self._kept_s = most_bytes, kept_s
        self._entries: OrderedDict[str, _Entry[T]] = OrderedDict()
        self._bytes = Counter[str]()  # By host.

    def put(self, host: str, value: T, size: int, prefix: str = "", name: str = "") -> tuple[str, int]:
        """Keep a value for a host. size: its bytes. name: its name, from `new_name`; empty: make one that begins with `prefix`. Returns
        (its name, Unix time until which it is kept). A value of more than `most_bytes` is dropped at once."""
        self._clear(size)
        name, expires_at = name or new_name(prefix), time.time() + self._kept_s
        self._entries[name] = _Entry(value, host, size, expires_at)
        self._bytes[host] += size
        self._clear(0)
        return name, int(expires_at)

    def get(self, name: str) -> T | None:
        """The value that is kept under this name; None if it is gone."""
        self._clear(0)
        entry = self._entries.get(name)
        return None if entry is None else entry.value

    def _clear(self, size: int) -> None:
        """Drop values that have expired, and then others until `size` more bytes fit."""
        now_s = time.time()
        # The first entry is the oldest, and expires first: all are kept for the same time.
        while self._entries and next(iter(self._entries.values())).expires_at <= now_s:
            self._drop(next(iter(self._entries)))
        while self._entries and self._bytes.total() + size > self._most_bytes:
            host, _ = self._bytes.most_common(1)[0]
            self._drop(next(name for name, entry in self._entries.items() if entry.host == host))

    def _drop(self, name: str) -> None:
        entry = self._entries.pop(name)
        self._bytes[entry.host] -= entry.size
        if not self._bytes[entry.host]:
            del self._bytes[entry.host]


FILES_BYTES = 64 << 20
"""The most bytes of all pictures that have URLs."""


@dataclass(frozen=True, slots=True)
class StoredPicture:
    """A picture that can be fetched at a URL. data: its file."""

    data: bytes
    media_type: str


TRANSCRIPTS_BYTES = 16 << 20
"""The most bytes of all texts."""

ENTRY_BYTES = 512
"""Bytes that an entry counts for in addition to its text: they bound the number of empty texts too."""


class Transcripts:
    """Keeps the text of each sound for the client that heard it."""

    def __init__(self) -> None:
        self._texts: ExpiringCache[tuple[str, str]] = ExpiringCache(TRANSCRIPTS_BYTES)

    def put(self, host: str, client: str, text: str, name: str = "") -> tuple[str, int]:
        """Keep a text for a client on a host. Returns (its name, Unix time until which it is kept). name: its name if the client has it
        already; empty: make a new one."""
        return self._texts.put(host, (client, text), len(text.encode()) + ENTRY_BYTES, "audio_", name)

    def get(self, client: str, name: str) -> str | None:
        """The text of this name; None if it is gone, or was not kept for this client."""
        entry = self._texts.get(name)
        return entry[1] if entry is not None and entry[0] == client else None
