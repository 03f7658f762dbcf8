"""Listens at the gateway's port: uvicorn with the start and end of a server process, and limits on the resources of connections."""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from omnistage.gateway.door import Door, host_of
from omnistage.gateway.failure import ApiError
from omnistage.gateway.settings import GatewaySettings
from omnistage.host.addresses import MAX_PORT, check_can_listen, host_and_port, network_of
from omnistage.host.background import LastingTasks
from omnistage.host.descriptors import most_connections
from omnistage.host.errors import StartError
from omnistage.host.places import Client, Places, Refused, Ticket

HEAD_BYTES = 32 << 10
"""The most bytes of a request line and its headers."""

HEAD_LIMIT_S = 10.0
"""Seconds in which the head of a request must arrive, and the rest of a body that was refused."""

KEPT_LIMIT_S = 75
"""Seconds in which the next request must begin on a connection that is kept. It is longer than clients and proxies keep one, so no
request meets a connection that is being closed."""

UNREAD_LIMIT_S = 30.0
"""A client that reads less than `MIN_READ_BYTES` in so many seconds loses its connection."""

MIN_READ_BYTES = 4 << 10

UNSENT_BYTES = 128 << 10
"""Bytes of an answer that the kernel holds while the client does not read; uvicorn holds more, up to a bound of its own."""

BACKLOG = 1024
"""Connections that wait to be accepted."""

ACCEPTED_AT_ONCE = 16
"""Connections accepted in one turn of the event loop. Surplus connections are closed only after the turn: until then they must not take
all descriptors."""

MIN_DESCRIPTORS = 128
"""Fewest descriptors that the process must be allowed: with fewer, the connections accepted in one turn may take all of them."""

READ_BYTES = 16 << 10
"""Bytes read from one connection in one turn of the event loop: all requests in them are worked on before any other connection has its
turn."""

TINY_CHUNKS = 1024
"""Chunks of a body that may be tiny: after so many, chunks must have `MIN_CHUNK_BYTES` on average. A tiny chunk costs as much as one of
many KiB."""

MIN_CHUNK_BYTES = 64

STOP_LIMIT_S = 1
DATE_PERIOD_S = 1.0


class HttpListener:
    """Listens for HTTP/1.1 and passes it to an app."""

    def __init__(self, settings: GatewaySettings, app: ASGIApp, door: Door) -> None:
        self._settings, self._door = settings, door
        self._sockets: list[socket.socket] = []  # what `bind` has bound
        self._lasting = LastingTasks()
        config = uvicorn.Config(
            app,
            http=_protocol(door),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=bool(settings.trusted_proxies),
            forwarded_allow_ips=list(settings.trusted_proxies),
            backlog=ACCEPTED_AT_ONCE,
            h11_max_incomplete_event_size=HEAD_BYTES,
            timeout_keep_alive=KEPT_LIMIT_S,
            timeout_graceful_shutdown=STOP_LIMIT_S,
        )
        config.load()
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)

    def bind(self) -> str:
        """Bind the first free port, counted up from that of --address, and return HOST:PORT. If none is free, raises the StartError of the
        first."""
        _check_descriptors()
        host, port = host_and_port(self._settings.address)
        # Port 0 stands for any free port, so one try is enough.
        end_port = min(port + self._settings.port_tries, MAX_PORT + 1) if port else 1
        for each_port in range(port, end_port):
            try:
                listening = _listening(host, each_port)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    break
            else:
                self._sockets.append(listening)
                return f"{self._settings.address.rpartition(':')[0]}:{listening.getsockname()[1]}"
        check_can_listen(self._settings.address, "--address")
        raise StartError(f"cannot listen on {self._settings.address}; choose another --address")

    async def open(self) -> None:
        """Start to accept connections."""
        self._lasting.start("omnistage-date", self._keep_date())
        await self._server.startup(sockets=self._sockets)
        for listening in self._sockets:
            listening.listen(BACKLOG)

    async def say(self, *, serves: bool) -> None:
        """Set whether the gateway answers requests, or refuses them because it is ending."""
        self._door.serves = serves

    async def close(self, *, is_broken: bool) -> None:
        """Accept no more connections, and give running requests `STOP_LIMIT_S` seconds. is_broken: break their answers off at once."""
        await self._lasting.close()
        if is_broken:  # The connections break, so that no client mistakes a part of an answer for the whole.
            for connection in list(self._server.server_state.connections):
                if connection.transport is not None:
                    connection.transport.abort()
        await self._server.shutdown(sockets=self._sockets)

    async def _keep_date(self) -> None:
        """Set the header Date each second. uvicorn's own loop wakes ten times a second."""
        while True:
            await self._server.on_tick(0)
            await asyncio.sleep(DATE_PERIOD_S)


def _check_descriptors() -> None:
    """Raises StartError if the process may open too few descriptors."""
    max_descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if max_descriptors != resource.RLIM_INFINITY and max_descriptors < MIN_DESCRIPTORS:
        raise StartError(f"only {max_descriptors} descriptors are allowed, and {MIN_DESCRIPTORS} are needed; raise the limit (ulimit -n)")


def _listening(host: str, port: int) -> socket.socket:
    """A listening socket whose connections send each piece at once. Raises OSError."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    listener = socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=family == socket.AF_INET6)
    # Connections have this option from their listener. asyncio sets it only where the protocol of a socket is named, which Python leaves
    # out here; without it the second piece of an answer waits 40 ms for the client to acknowledge the first.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


class _Events(h11.Connection):
    """Parses a client's requests. A body that comes in tiny chunks is an error."""

    _chunks = 0
    _bytes = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._bytes += len(event.data)
            if self._chunks > TINY_CHUNKS and self._bytes < MIN_CHUNK_BYTES * (self._chunks - TINY_CHUNKS):
                raise h11.RemoteProtocolError("the body comes in tiny chunks")
        return event


def _protocol(door: Door) -> type[H11Protocol]:
    """Makes the class of a gateway's connections, which counts the connections of each host."""
    places = Places(most_connections())

    class HttpConnection(H11Protocol):
        """One connection. It is closed when there are too many, when its request does not arrive, or when the client does not read."""

        _head: asyncio.TimerHandle | None = None
        _unread: asyncio.TimerHandle | None = None
        _place: Ticket | None = None

        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **keywords)
            self.conn = _Events(h11.SERVER, HEAD_BYTES)

        def connection_made(self, transport: Any) -> None:
            """Count the connection and start its time limit; abort it if there are too many connections."""
            super().connection_made(transport)
            try:
                self._place = places.take(Client(network_of(host_of(self.client))))
            except Refused:
                self.connections.discard(self)  # At once, so that connections in the same turn of the loop find its place free.
                transport.abort()
                return
            transport.max_size = READ_BYTES  # asyncio's name for the most bytes of one read.
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
            door.metrics.connections.set(len(self.connections))
            self._watch_head()

        def connection_lost(self, exc: Exception | None) -> None:
            """Stop the timers, and count the connection no more."""
            for timer in (self._head, self._unread):
                if timer is not None:
                    timer.cancel()
            if self._place is not None:
                places.leave(self._place)
            super().connection_lost(exc)
            door.metrics.connections.set(len(self.connections))

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch_head()

        def send_400_response(self, msg: str) -> None:
            """Answer bytes that are no HTTP, in the form of all errors."""
            if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # Another answer has begun, and an error cannot replace it.
                self.transport.abort()
                return
            text = "this is no HTTP/1.1 request, or one with too large a head, or with a body in too many chunks"
            error = ApiError(400, text, code="invalid_http")
            body = bytes(error.response_at("").body)
            headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Connection", "close")]
            for event in (h11.Response(status_code=error.status, headers=headers), h11.Data(body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
            self.transport.close()

        def _watch_head(self) -> None:
            """Run the time limit for a head while none has come."""
            waits_for_head = self.cycle is None or self.cycle.response_complete
            if waits_for_head and self._head is None:
                self._head = self.loop.call_later(HEAD_LIMIT_S, self.transport.abort)
            elif not waits_for_head and self._head is not None:
                self._head.cancel()
                self._head = None

        def pause_writing(self) -> None:
            super().pause_writing()
            self._watch_reading()

        def _watch_reading(self, unread_before: int | None = None) -> None:
            """Close the connection if the client reads too slowly. unread_before: unread bytes at the last look."""
            unread = self.transport.get_write_buffer_size()
            if unread_before is not None and unread > unread_before - MIN_READ_BYTES:
                self.transport.abort()
                return
            self._unread = self.loop.call_later(UNREAD_LIMIT_S, self._watch_reading, unread)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._unread is not None:
                self._unread.cancel()
                self._unread = None

    return HttpConnection
