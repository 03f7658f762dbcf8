"""The allow-list: the addresses that a stage may dial."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable

import structlog

from omnistage.host.addresses import check_address
from omnistage.host.names import Name, Resolver, SystemResolver, check_replica_address, name_of
from omnistage.host.spare import SHORTAGES

log = structlog.get_logger(__name__)

KEPT_S = 1.0
"""Seconds for which the result of a lookup, even an empty result, counts as current."""

_NUMERIC = re.compile(r"(\[.*\]|[0-9.]+):[0-9]+")


def check_entry(entry: str) -> str:
    """The entry, if it is a valid one of an allow-list: HOST:PORT, or dns:///NAME:PORT. Raises ValueError that says what to write."""
    if "*" in entry or "?" in entry:
        raise ValueError(
            f"{entry!r} is a pattern: write each address, HOST:PORT,HOST:PORT, or a name that stands for all addresses it has, such as "
            f"talker:50051"
        )
    return check_replica_address(entry)


class AllowList:
    """The addresses that a stage may dial. An address is allowed if an entry is written the same way, or if an entry's name has it now. An
    address that is not plain HOST:PORT, such as a gRPC target with a scheme, is never allowed.
    """

    def __init__(self, entries: Iterable[str], resolve: Resolver | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """resolve: finds the addresses of names; None: the system's resolver. clock: in seconds. Raises ValueError for a pattern."""
        checked = [check_entry(entry) for entry in entries]
        self._exact = frozenset(checked)
        names = [name_of(entry if name_of(entry) else f"dns:///{entry}") for entry in checked if not _NUMERIC.fullmatch(entry)]
        self._names = tuple(dict.fromkeys(name for name in names if name is not None))
        self._resolve = resolve or SystemResolver()
        self._clock = clock
        self._known: dict[Name, tuple[float, Collection[str]]] = {}  # time and result of the last lookup

    async def allows(self, address: str) -> bool:
        """Whether the address may be dialled now. If a name is on the list, waits for its lookup as long as the resolver does."""
        try:
            check_address(address)
        except ValueError:
            return False
        if address in self._exact:
            return True
        port = address.rpartition(":")[2]
        for name in self._names:
            if str(name.port) == port and address in await self._addresses(name):
                return True
        return False

    async def _addresses(self, name: Name) -> Collection[str]:
        """The addresses of the name now; if the lookup fails, its last addresses, because DNS is down more often than a name moves."""
        asked_at, addresses = self._known.get(name, (-KEPT_S, ()))
        if self._clock() < asked_at + KEPT_S:
            return addresses
        try:
            addresses = frozenset(await self._resolve(name))
        except SHORTAGES as error:
            log.warning("allow.name_not_found", name=str(name), why=str(error))
        self._known[name] = (self._clock(), addresses)
        return addresses
