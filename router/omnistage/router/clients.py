"""The identity of a client, by which the router distinguishes clients. The router verifies nobody; if strangers can reach it, put a gateway
that verifies them before it."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Hashable
from ipaddress import IPv4Address, IPv6Network, ip_address
from typing import Protocol
from urllib.parse import unquote

from grpc.aio import Metadata

API_KEY = "x-api-key"
"""The key of a call's metadata whose value names the client. The router keeps only a digest of the value; logs and traces show the first
digits of the digest."""

_NAMES_KEY = secrets.token_bytes(32)
"""A secret of this process: without it, anybody could make the digests of all addresses and find an address by its name."""

SECRET_ID_CHARACTERS = 32
"""A request id of this length, such as the 32 hex digits of a UUID, is known only to the client that made it."""


class CallOrigin(Protocol):
    """The part of grpc.aio.ServicerContext that says where a call comes from."""

    def peer(self) -> str: ...

    def invocation_metadata(self) -> Metadata | None: ...


def client_of(call: CallOrigin) -> Hashable:
    """The client of a call, whose places the call uses. All calls with one API key are one client; so are all calls without a key from one
    host or one IPv6 network."""
    key = _api_key(call)
    return ("key", key) if key else ("host", _host(call.peer()))


def client_text(client: Hashable) -> str:
    """The name of a client in logs and traces: `key:` and the first 16 hex digits of the SHA-256 of its API key, else its host or
    network."""
    if not isinstance(client, tuple):
        return str(client)
    kind, value = client
    if kind == "key":
        return f"key:{value[:16]}"
    return str(IPv6Network((int(value) << 64, 64))) if value.isdecimal() else value


def name_of(client: Hashable) -> str:
    """The name by which stages distinguish clients. The name reveals nothing of the client and stays the same as long as this process
    lives."""
    return hashlib.blake2b(repr(client).encode(), key=_NAMES_KEY, digest_size=8).hexdigest()


def scope_of(client: Hashable) -> str:
    """The scope of the prefix cache for a client's prompts: a scope of its own if it has an API key; one scope for all clients without a
    key."""
    return name_of(client) if isinstance(client, tuple) and client[0] == "key" else ""


def request_of(call: CallOrigin, request_id: str) -> Hashable:
    """The identity of a request: a call with the identity of an earlier call takes that call's place.

    With an API key the identity is the key and the id. Without a key a long id is enough, wherever the call comes from: after a lost
    connection a client comes from another port and perhaps another address. A short id may be used by several clients, so it counts on
    its own connection only.
    """
    key = _api_key(call)
    if key:
        return ("key", key, request_id)
    if len(request_id) >= SECRET_ID_CHARACTERS:
        return ("id", request_id)
    return ("connection", call.peer(), request_id)


def _api_key(call: CallOrigin) -> str:
    """The SHA-256 of a call's API key, in hex; empty without a key."""
    given = next((value for name, value in call.invocation_metadata() or () if name == API_KEY), "")
    if not given:
        return ""
    return hashlib.sha256(given if isinstance(given, bytes) else given.encode()).hexdigest()


def _host(peer: str) -> str:
    """The host of a gRPC peer. `ipv4:HOST:PORT` gives HOST; `ipv6:[HOST]:PORT` gives the upper 64 bits of the address as a decimal number,
    because a host owns all addresses of such a network. All peers on sockets of the file system are the host "local"."""
    if not peer.startswith(("ipv4:", "ipv6:")):
        return "local"
    host = unquote(peer.partition(":")[2].rpartition(":")[0]).strip("[]")
    address = ip_address(host)
    if isinstance(address, IPv4Address):
        return str(address)
    return str(address.ipv4_mapped or int(address) >> 64)
