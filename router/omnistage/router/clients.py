"""Who asks: what the router tells clients apart by. It checks nobody; a gateway that does stands before a router that strangers reach."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Hashable
from ipaddress import IPv4Address, IPv6Network, ip_address
from typing import Protocol
from urllib.parse import unquote

from grpc.aio import Metadata

API_KEY = "x-api-key"
"""Metadata of a call; kept as a digest only, of which logs and traces show the beginning."""

_NAMES_KEY = secrets.token_bytes(32)
"""Without it the digests of all addresses could be made, and an address be found by its name."""

SECRET_ID_CHARACTERS = 32
"""A request id of this length, such as 32 hex digits of a UUID, is known to nobody but who made it."""


class Caller(Protocol):
    """What a call says of its other end."""

    def peer(self) -> str: ...

    def invocation_metadata(self) -> Metadata | None: ...


def client_of(call: Caller) -> Hashable:
    """Whose places are counted together: calls with one API key, else calls from one host, or one IPv6 network."""
    key = _api_key(call)
    return ("key", key) if key else ("host", _host(call.peer()))


def shown(client: Hashable) -> str:
    """A client as logs and traces have it: `key:` and the first 16 hex digits of the SHA-256 of its API key, else its host or network."""
    if not isinstance(client, tuple):
        return str(client)
    kind, value = client
    if kind == "key":
        return f"key:{value[:16]}"
    return str(IPv6Network((int(value) << 64, 64))) if value.isdecimal() else value


def name_of(client: Hashable) -> str:
    """What stages tell clients apart by: it says nothing of a client, and is the same as long as this process lives."""
    return hashlib.blake2b(repr(client).encode(), key=_NAMES_KEY, digest_size=8).hexdigest()


def scope_of(client: Hashable) -> str:
    """Whose prompts may be found computed for a client's: its own, by its API key; those of all without a key together."""
    return name_of(client) if isinstance(client, tuple) and client[0] == "key" else ""


def request_of(call: Caller, request_id: str) -> Hashable:
    """What is one request, so that asking it again takes the place of the first call.

    With an API key: the key and the id. Without one a long id is enough, from wherever it comes, because a client that goes on after a lost
    connection comes from another port and perhaps another address. A short id may be anybody's: it counts on its own connection only.
    """
    key = _api_key(call)
    if key:
        return ("key", key, request_id)
    if len(request_id) >= SECRET_ID_CHARACTERS:
        return ("id", request_id)
    return ("connection", call.peer(), request_id)


def _api_key(call: Caller) -> str:
    given = next((value for name, value in call.invocation_metadata() or () if name == API_KEY), "")
    if not given:
        return ""
    return hashlib.sha256(given if isinstance(given, bytes) else given.encode()).hexdigest()


def _host(peer: str) -> str:
    """`ipv4:HOST:PORT` without the port, `ipv6:[HOST]:PORT` as its network of 64 bits: a host has all addresses of that. All who come
    through a socket of the file system are one."""
    if not peer.startswith(("ipv4:", "ipv6:")):
        return "local"
    host = unquote(peer.partition(":")[2].rpartition(":")[0]).strip("[]")
    address = ip_address(host)
    if isinstance(address, IPv4Address):
        return str(address)
    return str(address.ipv4_mapped or int(address) >> 64)
