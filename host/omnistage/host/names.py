"""Addresses that are names: `dns:///NAME:PORT` stands for one replica at each address that the name has now.

docker-compose gives a service's name one address per container; Kubernetes gives a headless service's name one per ready pod.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

from omnistage.host.addresses import check_address, check_port

LOOKUP_TIMEOUT_S = 2.0

_NAME = re.compile(r"dns:///(?P<host>[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63}){0,9}\.?):(?P<port>\d{1,5})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Name:
    """A host name with a port that is the same at all its addresses."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"dns:///{self.host}:{self.port}"


Resolver = Callable[[Name], Awaitable[Collection[str]]]
"""The addresses, HOST:PORT, that a name has now. Raises OSError, for example TimeoutError, if the lookup fails."""


def check_replica_address(address: str) -> str:
    """Check the address of one replica or of several, and return it. Raises ValueError."""
    name = name_of(address)
    if name is not None:
        check_port(name.port, address)
        return address
    try:
        return check_address(address)
    except ValueError as error:
        raise ValueError(f"{error}; dns:///NAME:PORT stands for all addresses of a name") from None


def name_of(address: str) -> Name | None:
    """The name in a checked address, or None for a plain HOST:PORT."""
    match = _NAME.fullmatch(address)
    return Name(match["host"], int(match["port"])) if match else None


class SystemResolver:
    """Asks the system: hosts file and DNS. It uses at most one thread for a name, however long an answer takes."""

    def __init__(self) -> None:
        self._lookups: dict[Name, asyncio.Task[list[str]]] = {}

    async def __call__(self, name: Name) -> list[str]:
        """The addresses of a name, HOST:PORT. Raises OSError, also if the lookup takes too long. A lookup that takes too long goes on, and
        the next call waits for it, because a thread that waits for DNS cannot be stopped."""
        lookup = self._lookups.get(name) or asyncio.create_task(_look_up(name))
        self._lookups[name] = lookup
        await asyncio.wait({lookup}, timeout=LOOKUP_TIMEOUT_S)
        if not lookup.done():
            raise TimeoutError(f"no answer within {LOOKUP_TIMEOUT_S:g} s")
        if self._lookups.get(name) is lookup:  # Several calls may have waited for it; the first one forgets it.
            del self._lookups[name]
        return lookup.result()


async def _look_up(name: Name) -> list[str]:
    """The addresses of a name, HOST:PORT: its A records, or its AAAA records if it has none. With both, every replica would be listed
    twice."""
    infos = await asyncio.get_running_loop().getaddrinfo(name.host, name.port, type=socket.SOCK_STREAM)
    by_family = {
        family: [address for also, _, _, _, (address, *_) in infos if also == family] for family in (socket.AF_INET, socket.AF_INET6)
    }
    if by_family[socket.AF_INET]:
        return [f"{address}:{name.port}" for address in by_family[socket.AF_INET]]
    return [f"[{address}]:{name.port}" for address in by_family[socket.AF_INET6]]
