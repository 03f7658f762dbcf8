"""A service that is called over gRPC: its port, its health, reflection, and channelz if it is asked for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

import grpc.aio
from grpc_channelz.v1 import channelz
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH_NAME
from grpc_health.v1.health import aio as health
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from omnistage.host import process
from omnistage.host.addresses import check_can_listen
from omnistage.host.descriptors import most_connections
from omnistage.host.errors import StartError
from omnistage.host.settings import ServerSettings
from omnistage.wire.channel import Credentials, server_options

STOP_GRACE_S = 0.5


class GrpcService(process.Service, Protocol):
    """The service that a process serves over gRPC."""

    name: str
    """Full name of its gRPC service, for health and reflection."""

    max_request_bytes: int
    """Largest size of a request in bytes; gRPC refuses a larger request."""

    max_calls: int | None
    """Largest number of open calls of any kind; gRPC refuses further calls before it reads their requests. None: no limit."""

    interceptors: Sequence[grpc.aio.ServerInterceptor]
    """Interceptors, which see every call before the service does."""

    def register(self, server: grpc.aio.Server) -> None: ...


async def serve(
    settings: ServerSettings, credentials: Credentials, service: GrpcService, registry: CollectorRegistry, ready: dict[str, str]
) -> None:
    """Serve over gRPC until SIGTERM, SIGINT or the end of the lifeline. registry: the metrics of the service. ready: more fields of the
    ready line. Raises StartError or Broken."""
    listener = GrpcListener(settings, credentials, service)
    async with _channelz(settings.channelz_address, credentials) as channelz_address:
        await process.serve(settings, service, listener, registry, {"channelz_address": channelz_address, **ready})


class GrpcListener:
    """The port of a GrpcService (process.Listener): a gRPC server with health and reflection."""

    def __init__(self, settings: ServerSettings, credentials: Credentials, service: GrpcService) -> None:
        self._settings, self._credentials, self._name = settings, credentials, service.name
        self._server = grpc.aio.server(
            interceptors=service.interceptors,
            options=server_options(
                settings.max_message_bytes, service.max_request_bytes, kept_port=settings.kept_port, max_connections=most_connections()
            ),
            maximum_concurrent_rpcs=service.max_calls,
        )
        service.register(self._server)
        self._checks = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._checks, self._server)
        reflection.enable_server_reflection((service.name, HEALTH_NAME, reflection.SERVICE_NAME), self._server)

    def bind(self) -> str:
        return _bind(self._server, self._credentials, self._settings.address, is_reserved=self._settings.kept_port)

    async def open(self) -> None:
        # The library's servicer begins with SERVING for the whole server.
        await self.say(serves=False)
        await self._server.start()

    async def say(self, *, serves: bool) -> None:
        statuses = health_pb2.HealthCheckResponse
        for service in ("", self._name, "readiness"):
            await self._checks.set(service, statuses.SERVING if serves else statuses.NOT_SERVING)
        await self._checks.set("liveness", statuses.SERVING)

    async def close(self, *, is_broken: bool) -> None:
        await self._checks.enter_graceful_shutdown()
        await self._server.stop(0 if is_broken else STOP_GRACE_S)


def _bind(server: grpc.aio.Server, credentials: Credentials, address: str, *, is_reserved: bool = False) -> str:
    """Take the port of HOST:PORT; port 0 takes a free one. Returns its HOST:PORT. is_reserved: as in `check_can_listen`. Raises
    StartError."""
    host, _, port_text = address.rpartition(":")
    if is_reserved:
        check_can_listen(address, "--address", is_reserved=True)  # With SO_REUSEPORT a second listener is no error.
    port = credentials.listen(server, address)
    if port == 0:
        check_can_listen(address, "--address", is_reserved=is_reserved)
        raise StartError(f"cannot listen on {address}: the port is taken or the address is not of this host; choose another --address")
    if port_text not in ("0", str(port)):
        raise StartError(f"asked for {address}, got port {port}")
    return f"{host}:{port}"


@asynccontextmanager
async def _channelz(address: str, credentials: Credentials) -> AsyncIterator[str]:
    """Serve channelz while the block runs, on a port of its own: channelz names all connections of this process, so it is not for clients.
    address: HOST:PORT; empty: nothing is served. Yields the address with the real port; empty if nothing is served."""
    if not address:
        yield ""
        return
    server = grpc.aio.server(options=server_options())
    channelz.add_channelz_servicer(server)
    bound = _bind(server, credentials, address)
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(0)
