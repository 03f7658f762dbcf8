"""Counts the memory that requests hold, with a bound for all of them and for each host.

A request counts for its body and the values in it until the client library has copied what it needs; from then on for these copies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from omnistage.gateway.failure import ApiError
from omnistage.host.places import HOST_SHARE

BODIES_BYTES = 256 << 20
"""The most bytes of memory for all requests."""

SMALL_BYTES = 64 << 10
SMALL_BODIES_BYTES = 32 << 20
"""The most bytes of memory for requests whose bodies have at most SMALL_BYTES, once BODIES_BYTES are taken."""

CHARACTER_BYTES = 4
"""The most bytes of a character."""


class Ledger:
    """Counts bytes of memory by host. limit_bytes: of all hosts together."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held_bytes = Counter[str]()

    @property
    def host_limit_bytes(self) -> int:
        """The most bytes that one host can have."""
        return int(HOST_SHARE * self._limit_bytes)

    def take(self, host: str, size_bytes: int) -> bool:
        """Count more bytes for a host. Returns False, and counts nothing, if there is no room for them. As in host/places.py, a host gets
        HOST_SHARE of what the others leave, and a host that holds nothing gets what is free."""
        free_bytes, of_host = self._limit_bytes - self._held_bytes.total() - size_bytes, self._held_bytes[host] + size_bytes
        shared_bytes = free_bytes + of_host if self._held_bytes[host] else self._limit_bytes
        if free_bytes < 0 or of_host > HOST_SHARE * shared_bytes:
            return False
        self._held_bytes[host] += size_bytes
        return True

    def give_back(self, host: str, size_bytes: int) -> None:
        self._held_bytes[host] -= size_bytes
        if not self._held_bytes[host]:
            del self._held_bytes[host]


class HeldMemory:
    """The bytes of memory that one request holds. ledgers: asked for room in this order. host: for which they are counted. refusal: the
    text of the error where there is no room. Call `free` at the end."""

    def __init__(self, ledgers: Sequence[Ledger], host: str, refusal: str = "too many large requests are being read") -> None:
        self._ledgers, self._host, self._refusal = ledgers, host, refusal
        self._sizes = [0] * len(ledgers)

    def take(self, size_bytes: int) -> None:
        """Count more bytes. Raises ApiError if there is no room for them: 503 now, 413 ever."""
        for number, ledger in enumerate(self._ledgers):
            if ledger.take(self._host, size_bytes):
                self._sizes[number] += size_bytes
                return
        if (needed_bytes := self.held_bytes + size_bytes) > sum(ledger.host_limit_bytes for ledger in self._ledgers):
            text = (
                f"the request takes {needed_bytes >> 20} MiB of memory with the copies for each of its answers, more than there is for it"
            )
            raise ApiError(413, text, code="too_large", hint="Send fewer or smaller media, or ask for fewer answers at once.")
        raise ApiError(503, self._refusal, code="overloaded", reason="OVERLOADED", retry_after_s=1.0)

    def resize(self, size_bytes: int) -> None:
        """Hold so many bytes in place of those before. Raises ApiError if there is no room for more. Fewer are always granted, also if
        other hosts came meanwhile and made the share of this one smaller."""
        growth_bytes = size_bytes - self.held_bytes
        if growth_bytes > 0:
            self.take(growth_bytes)
            return
        for number, ledger in enumerate(self._ledgers):
            freed_bytes = min(-growth_bytes, self._sizes[number])
            ledger.give_back(self._host, freed_bytes)
            self._sizes[number] -= freed_bytes
            growth_bytes += freed_bytes

    @property
    def held_bytes(self) -> int:
        return sum(self._sizes)

    def free(self) -> None:
        """Give back all bytes."""
        self.resize(0)


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
