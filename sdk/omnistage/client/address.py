"""Reads and checks the address of a router, HOST:PORT."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from contextlib import suppress

from omnistage.client.errors import BadRequestError

GRPC_TARGET = re.compile(r"(dns|ipv4|ipv6|unix|unix-abstract|vsock|passthrough|xds):")
URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)

LOOKUP_S = 2.0
"""Seconds that `is_local` may take to look up a name; after that it answers False."""

UNKNOWN = (socket.EAI_NONAME, socket.EAI_NODATA)


def split(addresses: str) -> list[str]:
    """The addresses in a text with commas between them. Raises BadRequestError if one cannot be an address; the error says why."""
    if not isinstance(addresses, str):
        raise _bad(f"is {addresses!r}; give text, HOST:PORT")
    return [_check_address(part.strip()) for part in addresses.split(",")]


async def is_unknown(address: str) -> bool:
    """True if the host is a name that no name service knows; False also if a name service does not answer."""
    if GRPC_TARGET.match(address):
        return False
    host = address.rpartition(":")[0].strip("[]")
    with suppress(ValueError):
        ipaddress.ip_address(host)
        return False
    try:
        await asyncio.get_running_loop().getaddrinfo(host, None)
    except socket.gaierror as error:
        return error.errno in UNKNOWN
    return False


async def is_local(address: str) -> bool:
    """Whether bytes sent to this address surely stay on this machine: it is a local socket or a loopback address. False if not known."""
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    hosts = _hosts(address)
    try:
        async with asyncio.timeout(LOOKUP_S):
            resolved = [await _addresses(host) for host in hosts]
    except (OSError, TimeoutError, ValueError):  # The look-up failed: the address may be of another machine.
        return False
    return all(one.is_loopback for addresses in resolved for one in addresses) and all(resolved) and bool(resolved)


def _hosts(address: str) -> list[str]:
    """The hosts in HOST:PORT, or in a target of gRPC; none if the target names no host."""
    match = GRPC_TARGET.match(address)
    if match is None:
        return [_host(address)]
    scheme, rest = match[1], address[match.end() :]
    if scheme == "dns" and (not rest.startswith("//") or rest.startswith("///")):
        return [_host(rest.removeprefix("///"))]
    # A target with a name server of its own may know other hosts.
    return [_host(one) for one in rest.split(",")] if scheme in ("ipv4", "ipv6") else []


def _host(text: str) -> str:
    """The host in HOST or HOST:PORT."""
    host, colon, port = text.rpartition(":")
    return (host if colon and port.isdigit() and (":" not in host or host.endswith("]")) else text).strip("[]")


async def _addresses(host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The IP addresses of a host. host: its name, or an IP address. Raises OSError for an unknown host."""
    with suppress(ValueError):
        return [ipaddress.ip_address(host)]
    infos = await asyncio.get_running_loop().getaddrinfo(host, None)
    return [ipaddress.ip_address(str(info[4][0]).partition("%")[0]) for info in infos]


def _check_address(address: str) -> str:
    """Returns `address` if it can be HOST:PORT or a target of gRPC. Raises BadRequestError otherwise."""
    if not address:
        raise _bad("is empty; give HOST:PORT of a router, or several with commas between them")
    if GRPC_TARGET.match(address):
        return address
    if url := URL.match(address):
        raise _bad(f"{address} is a URL; give HOST:PORT alone, without {url[0]} before it and without a path")
    if re.search(r"[\s/]", address):
        raise _bad(f"{address!r} is not HOST:PORT")
    host, colon, port = address.rpartition(":")
    if not colon and port.isdigit():
        raise _bad(f"{address} has no host; give HOST:PORT, such as 127.0.0.1:{address}")
    if not colon:
        raise _bad(f"{address} has no port; give HOST:PORT, such as {address}:50050")
    if not host:
        raise _bad(f"{address} has no host; give HOST:PORT, such as 127.0.0.1{address}")
    try:
        host.encode("idna")
    except UnicodeError:
        raise _bad(f"{address} names no possible host: between its dots stand 1 to 63 characters") from None
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise _bad(f"{address} is ambiguous; give an IPv6 address in brackets: [{host}]:{port}")
    if not (port.isascii() and port.isdigit()):
        raise _bad(f"the port of {address} is not a number")
    if not 0 < int(port) < 65536:
        raise _bad(f"{address} has port {port}; ports are 1 to 65535")
    return address


def _bad(description: str) -> BadRequestError:
    error = BadRequestError.of("address", description)
    error.hint = "Give the address that `omnistage serve` prints, such as 127.0.0.1:50050."
    return error
