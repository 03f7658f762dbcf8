"""The channel to a router: its credentials and its options."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import grpc

from omnistage.client import fork

MAX_MESSAGE_BYTES = 64 * 1024 * 1024

# gRPC notices a frozen peer only if ping_timeout_ms is set too: keepalive alone does not notice a stopped process. A ping, which gRPC's own
# threads answer, may take two seconds: a router on a busy machine is late, not lost.
OPTIONS: tuple[tuple[str, int], ...] = (
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

    def channel(self, address: str, options: Sequence[tuple[str, int]] = OPTIONS) -> grpc.aio.Channel:
        """An unconnected channel to HOST:PORT (or any gRPC target such as dns:///router:50050). Call it on the loop that will use it.
        Raises ForkedError."""
        fork.use()
        channel = grpc.aio.insecure_channel(address, options=options)
        fork.leave_to_parent(channel)
        return channel


INSECURE = ClientCredentials()

STATUS_TASK = "_AioCall._handle_status_once_received"
"""Name of the coroutine in which gRPC waits for the status of a call."""
ENDS_TIMEOUT_S = 0.5


async def wait_for_ends(watches: Iterable[asyncio.Task[None]] = ()) -> None:
    """Wait until gRPC has delivered the ends of all calls on this loop that are over, and of these watches of channels; ENDS_TIMEOUT_S at
    most, for other users of the loop may have calls that go on.

    A cancelled call is over at once for its caller, but gRPC delivers its status a moment later. If the loop is closed by then, the status
    becomes an error on any other loop of this process, because all loops share one poller."""
    statuses = [task for task in asyncio.all_tasks() if getattr(task.get_coro(), "__qualname__", "") == STATUS_TASK]
    if ends := [*statuses, *watches]:
        await asyncio.wait(ends, timeout=ENDS_TIMEOUT_S)
