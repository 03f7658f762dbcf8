"""Which calls a router takes: each client has some of them, health checks have their own, and a request has to arrive.

gRPC bounds the calls of a server, but of all clients together. Those that stay open, such as a watch over the health, or a call whose
request never comes, would be all of them before long.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from inspect import isasyncgenfunction
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1.health import SERVICE_NAME as HEALTH

from omnistage.link.errors import StageError, abort, bad_request
from omnistage.link.limits import MAX_CALLS
from omnistage.router.admission import overloaded
from omnistage.router.clients import client_of
from omnistage.router.places import Places, Refused

MAX_OPEN = MAX_CALLS * 3 // 4
"""Calls of all clients together. What gRPC takes beyond all bounds of this file is room for calls that are being refused."""

MAX_HEALTH = MAX_CALLS // 16
"""Health checks, and as many watches over the health."""

CALLS_SHARE = 0.75
"""Greatest part of each that one client may have; see Places."""

REQUEST_LIMIT_S = 60.0
"""Time for a request to arrive: 64 MiB at 9 Mbit/s."""

if TYPE_CHECKING:  # At run time gRPC's classes take no type arguments.
    Context = grpc.aio.ServicerContext[Any, Any]
    Handler = grpc.RpcMethodHandler[Any, Any]


class Gate(grpc.aio.ServerInterceptor):
    """Sees every call before its service does."""

    def __init__(self, request_limit_s: float = REQUEST_LIMIT_S) -> None:
        self._request_limit_s = request_limit_s
        self._open = Places(MAX_OPEN, CALLS_SHARE)
        self._health = {f"/{HEALTH}/{method}": Places(MAX_HEALTH, CALLS_SHARE) for method in ("Check", "Watch")}

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]], details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(details)
        return handler and self._gated(handler, self._health.get(details.method, self._open))

    def _gated(self, handler: Handler, places: Places) -> Handler:
        """The same as a stream of requests, whatever it is: gRPC begins that before a request is there."""

        async def call(requests: AsyncIterator[Any], context: Context) -> None:
            try:
                ticket = places.take(client_of(context))
            except Refused as refused:
                await abort(context, overloaded(f"too many calls are open: {refused}"))
            try:
                await _answer(handler, requests if handler.request_streaming else await self._request(context), context)
            except StageError as error:
                await abort(context, error)
            finally:
                places.leave(ticket)

        return grpc.stream_stream_rpc_method_handler(call, handler.request_deserializer, handler.response_serializer)

    async def _request(self, context: Context) -> Any:
        """The one request of a call. Raises BAD_REQUEST where none comes in time."""
        try:
            async with asyncio.timeout(self._request_limit_s):
                request = await context.read()
        except DecodeError:
            raise bad_request("request", "these bytes are no such message") from None
        except TimeoutError:
            raise bad_request("request", f"it did not arrive within {self._request_limit_s:g} s") from None
        if request is grpc.aio.EOF:
            raise bad_request("request", "the call has none")
        return request


async def _answer(handler: Handler, asked: Any, context: Context) -> None:
    # The types of grpcio's stubs are those of servers with threads.
    behavior: Any = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    if isasyncgenfunction(behavior):
        async for response in behavior(asked, context):
            await context.write(response)
    elif handler.response_streaming:
        await behavior(asked, context)
    else:
        await context.write(await behavior(asked, context))
