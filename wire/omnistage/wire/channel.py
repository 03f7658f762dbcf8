"""gRPC options of every connection, and how a process connects to others and listens for them.

A server's keepalive finds callers that were stopped. It is slow on purpose, because a busy machine answers a ping late. A stage that hangs
or was stopped is found by its pulse (link/liveness.py), which also considers whether there is another replica. So a caller never closes a
connection because pings go unanswered, and it hardly pings. Yet even its rare pings set TCP_USER_TIMEOUT: the kernel closes a connection
whose data is not acknowledged within `keepalive_timeout_ms`, for example because the peer's host is gone. The values belong together: a
caller that was stopped (SIGSTOP) is found only if `ping_timeout_ms` is set too, and a server without the two tolerant options cuts off
clients that ping more, with GOAWAY too_many_pings.

A process makes one `Credentials` when it reads its settings, and hands it to all code that makes a channel or listens. Connections are not
encrypted now. Encryption would be another class with these methods, and the code that uses this class would stay the same."""

from __future__ import annotations

import asyncio
from types import TracebackType

import grpc.aio

Options = list[tuple[str, int]]

MAX_MESSAGE_BYTES = 64 << 20
"""Default limit of a request in bytes, on both ends of every hop."""

MAX_PENDING_CALLS = 8192
MAX_PENDING_S = 600
"""How many calls may wait until a server's loop accepts them, and how many seconds a call may wait. The limits are high, because the loop
accepts calls as fast as it can, and refuses them with a reason. A call that waits too long ends by its caller's deadline."""

IDLE_LIMIT_MS = 300_000
"""A connection without a call is closed after this time, because it may belong to a stranger, and without pings nobody notices when its
other end is gone. A channel makes a new one with its next call. A router at rest looks at its stages more often (router/placement.py)."""

HANDSHAKE_LIMIT_MS = 10_000
"""A connection is closed if its other end has not said within this time that it speaks HTTP/2."""

MAX_CONNECTIONS = 8192
"""Largest number of connections of one server; it closes every further connection at once. A server with few descriptors takes fewer
(host/descriptors.py)."""

TAKEN_S = 1.0
"""Seconds for a kernel to accept a connection."""

_SERVER_PINGS_MS = 5000
_SERVER_PING_LIMIT_MS = 5000
_CLIENT_PINGS_MS = _CLIENT_PING_LIMIT_MS = 3_600_000
"""A client sends no pings without calls, but gRPC still wakes at this period. The limit is for the answer to any ping, also to the pings
that gRPC sends for its own measurements."""

_KEEPALIVE: Options = [
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 0),  # An idle stack is silent. The next call soon finds a lost connection.
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
        ("grpc.min_reconnect_backoff_ms", 2000),  # Milliseconds for one attempt to connect.
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.enable_http_proxy", 0),
        # Each channel has its own connection. By default all channels of a process to one address share one, and the pause after it failed.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def server_options(
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    max_request_bytes: int = 0,
    *,
    kept_port: bool = False,
    max_connections: int = MAX_CONNECTIONS,
) -> Options:
    """Options of a stage's or a router's server. max_message_bytes: largest answer. max_request_bytes: largest request; 0: as for answers.

    kept_port: another process of the same user keeps the port bound with SO_REUSEPORT, so the server needs that option to listen there.
    Elsewhere the option is off: a second server on a port would silently take half of its calls."""
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
        # Limits for calls that the event loop has not accepted yet. By default gRPC cancels some of them without a reason: by chance from
        # 1,000 on, and each after 30 s.
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
        ("grpc.server_max_unrequested_time_in_server", MAX_PENDING_S),
    ]


async def connect(channel: grpc.aio.Channel, timeout_s: float) -> None:
    """Return when the channel is connected. Raises ConnectionError if the peer refuses, TimeoutError if it does not answer.

    A stopped peer accepts the TCP connection and never finishes the HTTP/2 one; a call on it would wait until its deadline.
    """
    state = channel.get_state(try_to_connect=True)
    async with asyncio.timeout(timeout_s):
        while state is not grpc.ChannelConnectivity.READY:
            if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
                raise ConnectionError("connection refused")
            await channel.wait_for_state_change(state)
            state = channel.get_state(try_to_connect=True)


async def is_taken(address: str) -> bool:
    """Whether anything accepts connections at HOST:PORT. For a stopped process the kernel accepts them."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(TAKEN_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError, ValueError):  # No such port, no listener, a host that does not answer, or another form of address.
        return False
    writer.transport.abort()
    return True


class ConnectionWatch:
    """Reports when a channel loses its connection, even with no call on it; a context manager.

    gRPC cannot stop watching a state once it has begun. So one task watches the connection, however often `loss` is read.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._loss: asyncio.Task[None] | None = None

    @property
    def loss(self) -> asyncio.Task[None]:
        """A task that is done when the present connection is lost; done soon if there is none."""
        if self._loss is None or self._loss.done():
            self._loss = asyncio.create_task(self._wait())
        return self._loss

    @property
    def is_lost(self) -> bool:
        """Whether the connection has been lost since `loss` was last read."""
        return self._loss is not None and self._loss.done()

    def __enter__(self) -> ConnectionWatch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._loss is not None:
            self._loss.cancel()

    async def _wait(self) -> None:
        if self._channel.get_state() is grpc.ChannelConnectivity.READY:
            await self._channel.wait_for_state_change(grpc.ChannelConnectivity.READY)


class Credentials:
    """Credentials of a process whose connections are not encrypted."""

    def channel(self, address: str, options: Options) -> grpc.aio.Channel:
        """An unconnected channel to HOST:PORT or to any other gRPC target, for the event loop that runs now."""
        return grpc.aio.insecure_channel(address, options=options)

    def blocking_channel(self, address: str, options: Options) -> grpc.Channel:
        """As `channel`, for a process without an event loop."""
        return grpc.insecure_channel(address, options=options)

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """Have the server listen at HOST:PORT, before it starts. Returns its port, or 0 if it cannot listen there."""
        try:
            return server.add_insecure_port(address)
        except RuntimeError:
            return 0
