"""Counts the memory that requests hold, with a bound for all of them and for each host.

A request counts for its body and the values in it until the client library has copied what it needs; from then on for these copies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from omnistage.gateway.failure import ApiError

BODIES_BYTES = 256 << 20
"""The most bytes of memory for all requests."""

SMALL_BYTES = 64 << 10
SMALL_BODIES_BYTES = 32 << 20
"""The most bytes of memory for requests whose bodies have at most SMALL_BYTES, once BODIES_BYTES are taken."""

HOST_SHARE = 0.75
"""The largest part of either for one host, or one IPv6 network."""

CHARACTER_BYTES = 4
"""The most bytes of a character."""


class Ledger:
    """Counts bytes of memory by host. limit_bytes: of all hosts together."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held_bytes = Counter[str]()

    def take(self, host: str, size_bytes: int) -> bool:
        """Count more bytes for a host. Returns False, and counts nothing, if there is no room for them."""
        in_all, of_host = self._held_bytes.total() + size_bytes, self._held_bytes[host] + size_bytes
        if in_all > self._limit_bytes or of_host > HOST_SHARE * self._limit_bytes:
            return False
        self._held_bytes[host] += size_bytes
        return True

    def give_back(self, host: str, size_bytes: int) -> None:
        self._held_bytes[host] -= size_bytes
        if not self._held_bytes[host]:
            del self._held_bytes[host]


class HeldMemory:
    """The bytes of memory that one request holds. ledgers: asked for room in this order. host: for which they are counted. Call `free` at
    the end."""

    def __init__(self, ledgers: Sequence[Ledger], host: str) -> None:
        self._ledgers, self._host = ledgers, host
        self._sizes = [0] * len(ledgers)

    def take(self, size_bytes: int) -> None:
        """Count more bytes. Raises ApiError if there is no room for them."""
        for number, ledger in enumerate(self._ledgers):
            if ledger.take(self._host, size_bytes):
                self._sizes[number] += size_bytes
                return
        raise ApiError(503, "too many large requests are being read", code="overloaded", reason="OVERLOADED", retry_after_s=1.0)

    def free(self) -> None:
        """Give back all bytes."""
        for number, ledger in enumerate(self._ledgers):
            ledger.give_back(self._host, self._sizes[number])
            self._sizes[number] = 0


def size_of(value: object) -> int:
    """The bytes of all texts and files within a value. Media that the gateway has fetched are not among them: the fetcher counts them."""
    match value:
        case str():
            return len(value) if value.isascii() else CHARACTER_BYTES * len(value)
        case bytes():
            return len(value)
        case Mapping():
            return sum(size_of(key) + size_of(part) for key, part in value.items())
        case list() | tuple():
            return sum(map(size_of, value))
    return 0
