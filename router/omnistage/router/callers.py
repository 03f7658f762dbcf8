"""The client and the host of a call, and the names by which logs, stages and caches distinguish clients.

The router verifies no key; if strangers can reach it, put a gateway that verifies them before it. All clients of one host share the places
of a host, however many keys they invent."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Hashable
from typing import Protocol
from urllib.parse import unquote

import structlog
from grpc.aio import Metadata

from omnistage.host.addresses import network_of
from omnistage.host.places import Client
from omnistage.wire.token import GATEWAY_HOST, GATEWAY_KEY, Token

log = structlog.get_logger("omnistage.router.clients")

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


class Callers:
    """Finds the client of a call. gateway: the token that this stack's gateway shows; None: there is no gateway that is believed."""

    def __init__(self, gateway: Token | None = None) -> None:
        self._gateway = gateway
        self._has_warned = False

    def client_of(self, call: CallOrigin) -> Client:
        """The client of a call, whose places the call uses. From one host, all calls with one API key are one client; so are all calls
        without a key. The host is the call's own address, or for a call of this stack's gateway the host that the gateway names."""
        key, host = _api_key(call), self._named_host(call) or _host(call.peer())
        return Client(host, f"key:{key}" if key else "")

    def _named_host(self, call: CallOrigin) -> str:
        """The host for which the gateway calls; empty if the caller does not prove to be the gateway."""
        proof, host = _value(call, GATEWAY_KEY), _value(call, GATEWAY_HOST)
        if not proof or not isinstance(host, str):
            return ""
        if self._gateway is None or not self._gateway.matches(proof):
            if not self._has_warned:  # Once: anybody can send a wrong one again and again.
                log.warning("gateway.not_believed", peer=call.peer(), has_token=self._gateway is not None)
            self._has_warned = True
            return ""
        return f"gateway:{host}"


def client_text(client: Client) -> str:
    """The name of a client in logs and traces: `key:` and the first 16 hex digits of the SHA-256 of its API key, else its host or
    network."""
    return client.name[: len("key:") + 16] if client.name else client.host


def name_of(client: Client) -> str:
    """The name by which stages distinguish clients, HOST/CLIENT. The name reveals nothing of the client and stays the same as long as this
    process lives."""
    return f"{_digest(client.host)}/{_digest(client.name)}"


def scope_of(client: Client) -> str:
    """The scope of the prefix cache for a client's prompts: a scope of its own if it has an API key; one scope for all clients without a
    key."""
    return _digest(client.name) if client.name else ""


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), key=_NAMES_KEY, digest_size=8).hexdigest()


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
    key = _value(call, API_KEY)
    if not key:
        return ""
    return hashlib.sha256(key if isinstance(key, bytes) else key.encode()).hexdigest()


def _value(call: CallOrigin, key: str) -> str | bytes:
    """The first value of a key of the call's metadata; empty if there is none."""
    return next((value for name, value in call.invocation_metadata() or () if name == key), "")


def _host(peer: str) -> str:
    """The host of a gRPC peer, `ipv4:HOST:PORT` or `ipv6:[HOST]:PORT`. All peers on sockets of the file system are the host "local"."""
    if not peer.startswith(("ipv4:", "ipv6:")):
        return "local"
    return network_of(unquote(peer.partition(":")[2].rpartition(":")[0]).strip("[]"))
