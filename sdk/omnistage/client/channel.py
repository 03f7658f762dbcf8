"""The channel to a router: its options, and waiting until it is connected."""

from __future__ import annotations

import asyncio

import grpc

from omnistage.client.errors import BadRequestError, UnavailableError

MAX_MESSAGE_BYTES = 64 * 1024 * 1024

# A frozen peer is seen only when ping_timeout_ms is set too: keepalive alone does not notice a stopped process.
OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 500),
    ("grpc.http2.ping_timeout_ms", 500),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A proxy of the environment is for the web, not for a router of one's own.
    ("grpc.enable_http_proxy", 0),
    # Two clients in one process are two connections: closing one never touches the other.
    ("grpc.use_local_subchannel_pool", 1),
)


def open_channel(address: str) -> grpc.aio.Channel:
    """An unconnected channel to HOST:PORT (or any gRPC target such as dns:///router:50050). Call it on the loop that will use it."""
    if not address or address.isspace():
        raise BadRequestError.of("address", "is empty; give HOST:PORT of a router")
    return grpc.aio.insecure_channel(address, options=OPTIONS)


async def wait_connected(channel: grpc.aio.Channel, address: str, timeout_s: float) -> None:
    """Return when the channel is connected; raise UnavailableError when it is not within `timeout_s` seconds."""
    try:
        async with asyncio.timeout(timeout_s):
            await channel.channel_ready()
    except TimeoutError:
        raise UnavailableError(f"no server answers at {address} (waited {timeout_s:g} s)", code=grpc.StatusCode.UNAVAILABLE) from None
