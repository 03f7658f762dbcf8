"""Chooses a router among those that a client may ask: the first that answers, and the next one when it is lost. Before the class `Routers`
stand the parts of a connection: the key of the client, and the channel with its credentials and options; after it, the address.

API keys are sent with every call. The router counts places and separates computed prompts by key; it refuses no key."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import re
import socket
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

import grpc

from omnistage.client import threads
from omnistage.client.errors import BadRequestError, ClosedError, UnavailableError
from omnistage.v1 import omni_pb2_grpc

if TYPE_CHECKING:
    from omnistage.v1.omni_pb2_grpc import OmniServiceAsyncStub


KEY_VARIABLE = "OMNISTAGE_API_KEY"

KEY_METADATA = "x-api-key"
"""The metadata of a call that carries the key."""

MAX_KEY_CHARACTERS = 4096
"""A token that proves an identity may be long; all metadata of a call must fit into 8 KiB."""


class UnencryptedKeyWarning(UserWarning):
    """An API key goes to another host over a connection that is not encrypted: others on the way can read it."""


class ApiKey:
    """A key that can be sent. Raises BadRequestError for a text that cannot be sent. No message, repr or pickle shows the key."""

    __slots__ = ("_extra_metadata", "_secret")

    def __init__(self, secret: str, called: str = "api_key", extra_metadata: tuple[tuple[str, str], ...] = ()) -> None:
        """secret: the key itself. called: the caller's name for the key, for errors. extra_metadata: further metadata of each call."""
        if not isinstance(secret, str) or not secret:
            raise BadRequestError.of(called, f"is {'empty' if secret == '' else 'no text'}; give the key that you were given, or none")
        if len(secret) > MAX_KEY_CHARACTERS:
            raise BadRequestError.of(called, f"has {len(secret)} characters; give at most {MAX_KEY_CHARACTERS}")
        if not (secret.isascii() and secret.isprintable()) or secret != secret.strip():
            fault = "has characters that a key cannot have; give printable ASCII without spaces at its ends, and without a line end"
            raise BadRequestError.of(called, fault)
        self._secret, self._extra_metadata = secret, extra_metadata

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of each call."""
        return ((KEY_METADATA, self._secret), *self._extra_metadata)

    def __repr__(self) -> str:
        return "ApiKey(...)"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"an API key is not pickled: give it to the other process by {KEY_VARIABLE}")


def key_of(text: str | None, called: str = "api_key") -> ApiKey | None:
    """The key `text`, or else the key in the variable; None: neither exists. called: the caller's name for `text`. Raises BadRequestError,
    which names the wrong key."""
    if text is not None:
        return ApiKey(text, called)
    value = os.environ.get(KEY_VARIABLE, "")
    return ApiKey(value, KEY_VARIABLE) if value else None


MAX_MESSAGE_BYTES = 64 * 1024 * 1024

# gRPC notices a frozen peer only if ping_timeout_ms is set too: keepalive alone does not notice a stopped process. A ping, which gRPC's own
# threads answer, may take two seconds: a router on a busy machine is late, not lost.
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2000),  # Time for one attempt to connect.
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # The environment may name a proxy; that is for the web, so calls to a user's own router do not go through it.
    ("grpc.enable_http_proxy", 0),
    # Each client in a process has its own connection, so closing one client does not disturb another.
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(frozen=True, slots=True)
class ClientCredentials:
    """The way in which a client connects to routers: without encryption."""

    @property
    def is_encrypted(self) -> bool:
        """Whether others on the way to the router cannot read the bytes of the connection."""
        return False

    def channel(self, address: str, options: Sequence[tuple[str, int]] = CHANNEL_OPTIONS) -> grpc.aio.Channel:
        """An unconnected channel to HOST:PORT (or any gRPC target such as dns:///router:50050). Call it on the loop that will use it.
        Raises ForkedError."""
        threads.use_grpc()
        channel = grpc.aio.insecure_channel(address, options=options)
        threads.leave_to_parent(channel)
        return channel


INSECURE = ClientCredentials()

STATUS_TASK = "_AioCall._handle_status_once_received"
"""Name of the coroutine in which gRPC waits for the status of a call."""
ENDS_TIMEOUT_S = 0.5


async def wait_for_ends(watches: Iterable[asyncio.Task[None]] = ()) -> None:
    """Wait until gRPC has delivered the ends of all calls on this loop that are over, and until these watches of channels have ended. The
    wait lasts ENDS_TIMEOUT_S at most, because other users of the loop may have calls that go on.

    A cancelled call is over at once for its caller, but gRPC delivers its status a moment later. If the loop is closed by then, the status
    becomes an error on any other loop of this process, because all loops share one poller."""
    statuses = [task for task in asyncio.all_tasks() if getattr(task.get_coro(), "__qualname__", "") == STATUS_TASK]
    if ends := [*statuses, *watches]:
        await asyncio.wait(ends, timeout=ENDS_TIMEOUT_S)


TURN_S = 1.0
"""Seconds that one of several addresses may take to connect before the next one is tried. A host that is down does not even refuse."""

SHORT_S = 1.0
"""If a connection was waited for fewer seconds than this, the error advises a longer time limit: the router may be there."""


@dataclass(frozen=True, slots=True)
class Router:
    """A router that was connected a moment ago. stub: makes calls to it. metadata: to be sent with each call; it has the caller's key."""

    address: str
    stub: OmniServiceAsyncStub
    metadata: tuple[tuple[str, str], ...] = field(default=(), repr=False)


def warn(message: str) -> None:
    """Warn that a key is sent where others can read it. message: the whole text."""
    warnings.warn(message, UnencryptedKeyWarning, stacklevel=2)


class Routers:
    """The channels to the routers at some addresses, one for each, opened when it is first needed; all on one event loop.

    address: HOST:PORT, or several with commas between them; BadRequestError for any other text. The first that answers is used until it is
    lost, then the next one, and after the last the first.

    is_trusted: for addresses that no person named: called with the address before each use; if it returns False, UnavailableError is
    raised. warn: called once for each address, before a key goes there unencrypted.
    """

    def __init__(
        self,
        address: str,
        is_trusted: Callable[[str], bool] | None = None,
        *,
        credentials: ClientCredentials = INSECURE,
        warn: Callable[[str], None] = warn,
    ) -> None:
        self._addresses = split_addresses(address)
        self._is_trusted = is_trusted
        self._credentials = credentials
        self._warn = warn
        self._warned: set[str] = set()
        """Addresses that are local, or that `warn` has been called for."""
        self._resolved: set[str] = set()
        """Addresses whose host name has been resolved before. If it stops resolving, its router is probably starting again: wait for it."""
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._next = 0  # index in `_addresses` of the address in use
        self._waits: set[asyncio.Timeout] = set()  # one for each caller in `connect`; `close` lets them end
        self._watches: set[asyncio.Task[None]] = set()  # gRPC's watches of the states of channels
        self._closed = False

    @property
    def address(self) -> str:
        """The address in use, or the first to be tried."""
        return self._addresses[self._next]

    async def connect(self, timeout_s: float, key: ApiKey | None = None) -> Router:
        """The first router that is connected, for a caller with this key. Raises UnavailableError if none is connected within
        `timeout_s` seconds, no host is known, servers of other protocols answer, or the router is not trusted; ClosedError."""
        try:
            async with asyncio.timeout(timeout_s) as wait:
                self._waits.add(wait)
                try:
                    address = await self._first_connected()
                finally:
                    self._waits.discard(wait)
        except TimeoutError:
            if self._closed:
                raise ClosedError("the client was closed while it connected") from None
            addresses = ", ".join(self._addresses)
            hint = f"Give more time: {{timeout_s}}. {UnavailableError.ADVICE}" if timeout_s < SHORT_S else ""
            message = f"no server answers at {addresses} (waited {timeout_s:g} s)"
            raise UnavailableError(message, hint=hint, code=grpc.StatusCode.UNAVAILABLE) from None
        # Checked after the connection was made, because meanwhile another process may have begun to listen there.
        if self._is_trusted is not None and not await asyncio.to_thread(self._is_trusted, address):
            hint = f"If you trust it, name it: {{address={address}}}."
            raise UnavailableError(f"who listens at {address} by now is another user of this machine, or nobody", hint=hint)
        stub = omni_pb2_grpc.OmniServiceStub(self._channel(address))
        if key is None:
            return Router(address, stub)
        await self._watch_key(address)
        return Router(address, stub, key.metadata)

    async def _watch_key(self, address: str) -> None:
        """Warn before a key first goes unencrypted to another host. If the program turns the warning into an error, no key is sent."""
        if self._credentials.is_encrypted or address in self._warned:
            return
        if not await is_local(address):
            self._warn(f"the API key goes to {address} unencrypted: whoever is on the way can read it; use a tunnel, or a trusted network")
        self._warned.add(address)

    def note_loss(self, address: str) -> None:
        """Ask the next address from now on. Several calls to one router may all report its loss."""
        if address == self.address:
            self._next = (self._next + 1) % len(self._addresses)

    async def close(self) -> None:
        """Close all channels. Calls on them are cancelled; callers that wait for a connection get ClosedError."""
        self._closed = True
        for wait in self._waits:
            wait.reschedule(0.0)  # gRPC does not wake callers that wait for the state of a closed channel
        for channel in self._channels.values():
            await channel.close()
        await wait_for_ends(self._watches)

    async def _first_connected(self) -> str:
        """Try the addresses in a circle until one is connected, and return it. Raises UnavailableError if at none of them a router can
        be: no host is known, or a server of another protocol answers."""
        while True:
            unknown_hosts, others = 0, dict[str, str]()
            # Every address once, beginning with the address in use.
            for address in (*self._addresses[self._next :], *self._addresses[: self._next]):
                if await self._is_unknown(address):
                    unknown_hosts += 1
                elif await self._is_connected(address):
                    self._next = self._addresses.index(address)
                    return address
                elif other := await protocol_at(address):
                    others[address] = other
            if others and unknown_hosts + len(others) == len(self._addresses):
                fault = "; ".join(f"no router answers at {address}, but a server that speaks {other}" for address, other in others.items())
                raise UnavailableError(fault, hint=NOT_GRPC)
            if unknown_hosts == len(self._addresses):
                raise UnavailableError(f"no such host: {', '.join(self._addresses)}", hint="Check the spelling of the host name.")

    async def _is_unknown(self, address: str) -> bool:
        """Whether no name service knows the host now, and none knew it before."""
        if address in self._resolved:
            return False
        if await is_unknown(address):
            return True
        self._resolved.add(address)
        return False

    async def _is_connected(self, address: str) -> bool:
        """Wait for the connection; returns False if it took TURN_S and there are other addresses, or if it failed and there are others or
        a server of another protocol answers."""
        channel = self._channel(address)
        is_only = len(self._addresses) == 1
        try:
            async with asyncio.timeout(None if is_only else TURN_S):
                state = channel.get_state(try_to_connect=True)
                while state is not grpc.ChannelConnectivity.READY:
                    # A failure that is seen here is an old one, and gRPC tries again by itself, so wait for the next state.
                    await self._change_of(channel, state)
                    state = channel.get_state(try_to_connect=True)
                    has_failed = state is grpc.ChannelConnectivity.TRANSIENT_FAILURE
                    if has_failed and (not is_only or await protocol_at(address)):
                        return False
        except TimeoutError:
            return False
        return True

    async def _change_of(self, channel: grpc.aio.Channel, state: grpc.ChannelConnectivity) -> None:
        """Wait until the channel leaves the state. gRPC cannot cancel its watch, so that goes on without this caller, and `close` waits
        for its end."""
        watch = asyncio.create_task(channel.wait_for_state_change(state))
        self._watches.add(watch)
        watch.add_done_callback(self._drop_watch)
        await asyncio.shield(watch)

    def _drop_watch(self, watch: asyncio.Task[None]) -> None:
        """Forget a watch that has ended, and read its error, which asyncio logs otherwise."""
        self._watches.discard(watch)
        if not watch.cancelled():
            watch.exception()

    def _channel(self, address: str) -> grpc.aio.Channel:
        """The channel to an address, made when it is first needed. Raises ClosedError."""
        if self._closed:
            raise ClosedError("this client is closed")
        if address not in self._channels:
            self._channels[address] = self._credentials.channel(address)
        return self._channels[address]


GRPC_TARGET = re.compile(r"(dns|ipv4|ipv6|unix|unix-abstract|vsock|passthrough|xds):")
URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)

LOOKUP_S = 2.0
"""Seconds that `is_local` may take to look up a name; after that it answers False."""

PROBE_S = 1.0
"""Seconds in which a server must show what it speaks."""

SETTINGS = b"\0\0\0\4"
"""The first bytes of each server of gRPC: a length, and the type of the frame, which is the fourth byte."""

NOT_GRPC = "Give the router's address, which `omnistage serve` prints first, by default 127.0.0.1:50050; over HTTP clients of OpenAI ask."

UNKNOWN_HOST = (socket.EAI_NONAME, socket.EAI_NODATA)


def split_addresses(addresses: str) -> list[str]:
    """The addresses in a text with commas between them. Raises BadRequestError if one cannot be an address; the error says why."""
    if not isinstance(addresses, str):
        raise _bad_address(f"is {addresses!r}; give text, HOST:PORT")
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
        return error.errno in UNKNOWN_HOST
    return False


async def protocol_at(address: str) -> str:
    """The protocol that a server at this address speaks in place of gRPC, for people: HTTP, or "another protocol"; empty if it is gRPC, or
    not known."""
    if GRPC_TARGET.match(address):
        return ""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(PROBE_S):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            with closing(writer):
                writer.write(b"HEAD / HTTP/1.1\r\nHost: omnistage\r\nConnection: close\r\n\r\n")
                answer = await reader.read(len(SETTINGS))
    except (OSError, TimeoutError):
        return ""
    if not answer or answer[3:] == SETTINGS[3:]:
        return ""
    return "HTTP" if answer == b"HTTP" else "another protocol"


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
    has_addresses = bool(resolved) and all(resolved)  # There is a host, and each host has an address.
    return has_addresses and all(one.is_loopback for addresses in resolved for one in addresses)


def _hosts(address: str) -> list[str]:
    """The hosts in HOST:PORT, or in a target of gRPC; none if the target names no host."""
    match = GRPC_TARGET.match(address)
    if match is None:
        return [_host(address)]
    scheme, rest = match[1], address[match.end() :]
    # The target dns://SERVER/HOST has a name server of its own, which may know other hosts.
    has_name_server = rest.startswith("//") and not rest.startswith("///")
    if scheme == "dns" and not has_name_server:
        return [_host(rest.removeprefix("///"))]
    return [_host(one) for one in rest.split(",")] if scheme in ("ipv4", "ipv6") else []


def _host(text: str) -> str:
    """The host in HOST or HOST:PORT."""
    host, colon, port = text.rpartition(":")
    # An IPv6 address without brackets has colons of its own, and no port.
    has_port = colon and port.isdigit() and (":" not in host or host.endswith("]"))
    return (host if has_port else text).strip("[]")


async def _addresses(host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The IP addresses of a host. host: its name, or an IP address. Raises OSError for an unknown host."""
    with suppress(ValueError):
        return [ipaddress.ip_address(host)]
    infos = await asyncio.get_running_loop().getaddrinfo(host, None)
    return [ipaddress.ip_address(str(info[4][0]).partition("%")[0]) for info in infos]


def _check_address(address: str) -> str:
    """Returns `address` if it can be HOST:PORT or a target of gRPC. Raises BadRequestError otherwise."""
    if not address:
        raise _bad_address("is empty; give HOST:PORT of a router, or several with commas between them")
    if GRPC_TARGET.match(address):
        return address
    if url := URL.match(address):
        raise _bad_address(f"{address} is a URL; give HOST:PORT alone, without {url[0]} before it and without a path")
    if re.search(r"[\s/]", address):
        raise _bad_address(f"{address!r} is not HOST:PORT")
    host, colon, port = address.rpartition(":")  # Without a colon `port` is the whole text.
    if not colon and port.isdigit():
        raise _bad_address(f"{address} has no host; give HOST:PORT, such as 127.0.0.1:{address}")
    if not colon:
        raise _bad_address(f"{address} has no port; give HOST:PORT, such as {address}:50050")
    if not host:
        raise _bad_address(f"{address} has no host; give HOST:PORT, such as 127.0.0.1{address}")
    try:
        host.encode("idna")
    except UnicodeError:
        raise _bad_address(f"{address} names no possible host: between its dots stand 1 to 63 characters") from None
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise _bad_address(f"{address} is ambiguous; give an IPv6 address in brackets: [{host}]:{port}")
    if not (port.isascii() and port.isdigit()):
        raise _bad_address(f"the port of {address} is not a number")
    if not 0 < int(port) < 65536:
        raise _bad_address(f"{address} has port {port}; ports are 1 to 65535")
    return address


def _bad_address(description: str) -> BadRequestError:
    error = BadRequestError.of("address", description)
    error.hint = "Give the address that `omnistage serve` prints, such as 127.0.0.1:50050."
    return error
