"""Values that are kept for a while under names that nobody can guess: pictures behind URLs, the texts of earlier sounds."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

KEPT_S = 3600.0
"""How long a value is kept."""


def new_name(prefix: str = "") -> str:
    """A name that nobody can guess."""
    return f"{prefix}{secrets.token_urlsafe(24)}"


@dataclass(frozen=True, slots=True)
class _Entry(Generic[T]):
    value: T
    size: int
    expires_at: float


class ExpiringCache(Generic[T]):
    """A cache of at most so many bytes, which keeps each value for so many seconds; the oldest values go first."""

    def __init__(self, most_bytes: int, kept_s: float = KEPT_S) -> None:
        self._most_bytes, self._kept_s = most_bytes, kept_s
        self._entries: OrderedDict[str, _Entry[T]] = OrderedDict()
        self._bytes = 0

    def put(self, value: T, size: int, prefix: str = "", name: str = "") -> tuple[str, int]:
        """Keep a value. Returns its name, and the end of its time as Unix time. A value larger than the whole cache is dropped at once.
        name: from `new_name`, if the name had to be known before."""
        self._clear(size)
        name, expires_at = name or new_name(prefix), time.time() + self._kept_s
        self._entries[name] = _Entry(value, size, expires_at)
        self._bytes += size
        self._clear(0)
        return name, int(expires_at)

    def get(self, name: str) -> T | None:
        """The value that is kept under this name; None if it is gone."""
        self._clear(0)
        entry = self._entries.get(name)
        return None if entry is None else entry.value

    def _clear(self, size: int) -> None:
        now = time.time()
        while self._entries and (self._bytes + size > self._most_bytes or next(iter(self._entries.values())).expires_at <= now):
            _, entry = self._entries.popitem(last=False)
            self._bytes -= entry.size
