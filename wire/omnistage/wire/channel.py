"""gRPC options of every connection, and how one is made.

A server's keepalive finds callers that were stopped; it is slow on purpose, because a busy machine answers a ping late. A stage that hangs
or was stopped is found by its pulse (link/pulse.py), which also knows whether there is another one to go to: a caller gives no connection
up because pings are not answered, and hardly pings. But that it does makes the kernel give a connection up on which nobody has
acknowledged for `keepalive_timeout_ms` what was sent (TCP_USER_TIMEOUT), as when its host is gone. The values are one set: a caller that
was stopped (SIGSTOP) is seen only if `ping_timeout_ms` is set too, and a server without the two tolerant options cuts clients that ping
more off with GOAWAY too_many_pings.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

import grpc.aio

Options = list[tuple[str, int]]

MAX_MESSAGE_BYTES = 64 << 20
"""Default request limit, on both ends of every hop."""

MAX_PENDING_CALLS = 8192
MAX_PENDING_S = 600
"""Of one server. Calls are taken as fast as its loop goes round, and refused there, with a reason, by who counts sessions; those that wait
for that end by the deadline of their caller."""

IDLE_LIMIT_MS = 300_000
"""A connection without a call is closed after so long: it may be one of a stranger, and without pings nobody finds that its other end is
gone. A channel makes a new one with its next call. A router that rests looks at its stages more often (router/placement.py)."""

HANDSHAKE_LIMIT_MS = 10_000
"""A connection whose other end has not said within this time that it speaks HTTP/2 is closed."""

MAX_CONNECTIONS = 8192
"""Of one server, at once; one more is closed as it comes. A server has fewer where it may have few descriptors (host/descriptors.py)."""

TAKEN_S = 1.0
"""For a kernel to take a connection."""

_SERVER_PINGS_MS = 5000
_SERVER_PING_LIMIT_MS = 5000
_CLIENT_PINGS_MS = _CLIENT_PING_LIMIT_MS = 3_600_000
"""gRPC wakes for them on a connection without calls too, where it sends none. The limit is for an answer to any ping: gRPC sends some of
its own, to measure."""

_KEEPALIVE: Options = [
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 0),  # An idle stack is silent; whoever begins a call finds out soon enough.
]


def _message_limits(max_message_bytes: int, max_receive_bytes: int = 0) -> Options:
    return [
        ("grpc.max_receive_message_length", max_receive_bytes or max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
    ]


def client_options(max_message_bytes: int = MAX_MESSAGE_BYTES) -> Options:
    """Options of a channel to a stage or a router."""
    return [
        ("grpc.keepalive_time_ms", _CLIENT_PINGS_MS),
        ("grpc.http2.ping_timeout_ms", _CLIENT_PING_LIMIT_MS),
        *_KEEPALIVE,
        *_message_limits(max_message_bytes),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 2000),  # Time for one attempt to connect.
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.enable_http_proxy", 0),
        # A connection belongs to its channel: by default all channels of a process to one address share one, and the pause after it failed.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def server_options(
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    max_request_bytes: int = 0,
    *,
    kept_port: bool = False,
    max_connections: int = MAX_CONNECTIONS,
) -> Options:
    """Options of a stage's or a router's server. max_request_bytes: where requests are not as long as answers may be.

    kept_port: another process of the same user keeps the port bound with SO_REUSEPORT, which the server needs then to listen there.
    Elsewhere it is off: a second server on a port would silently take half its calls."""
    return [
        ("grpc.keepalive_time_ms", _SERVER_PINGS_MS),
        ("grpc.http2.ping_timeout_ms", _SERVER_PING_LIMIT_MS),
        *_KEEPALIVE,
        *_message_limits(max_message_bytes, max_request_bytes),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.max_connection_idle_ms", IDLE_LIMIT_MS),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_LIMIT_MS),
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.so_reuseport", int(kept_port)),
        # Calls that the event loop has not taken yet. By default gRPC cancels some of them without a reason: by chance from 1,000 on, and
        # each after 30 s.
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
        ("grpc.server_max_unrequested_time_in_server", MAX_PENDING_S),
    ]


async def connect(channel: grpc.aio.Channel, timeout_s: float) -> None:
    """Return when the channel is connected. Raises ConnectionError when the peer refuses, TimeoutError when it does not answer.

    A stopped peer accepts the TCP connection and never finishes the HTTP/2 one; a call on it would wait for as long as it may.
    """
    state = channel.get_state(try_to_connect=True)
    async with asyncio.timeout(timeout_s):
        while state is not grpc.ChannelConnectivity.READY:
            if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
                raise ConnectionError("connection refused")
            await channel.wait_for_state_change(state)
            state = channel.get_state(try_to_connect=True)


async def is_taken(address: str) -> bool:
    """Whether somebody takes connections at HOST:PORT. For a process that was stopped its kernel does."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(TAKEN_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError, ValueError):  # No such port; nobody; a host that does not answer; another form of address.
        return False
    writer.transport.abort()
    return True


class Connection:
    """Tells when a channel loses its connection, though there is no call on it; a context manager.

    gRPC cannot be told to watch a state no longer: there is one task, however often the same connection is looked at.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._lost: asyncio.Task[None] | None = None

    @property
    def lost(self) -> asyncio.Task[None]:
        """Done when the connection that there is now is lost; soon if there is none."""
        if self._lost is None or self._lost.done():
            self._lost = asyncio.create_task(self._wait())
        return self._lost

    @property
    def is_lost(self) -> bool:
        """Whether it has been lost since `lost` was asked for."""
        return self._lost is not None and self._lost.done()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._lost is not None:
            self._lost.cancel()

    async def _wait(self) -> None:
        if self._channel.get_state() is grpc.ChannelConnectivity.READY:
            await self._channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
