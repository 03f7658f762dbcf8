"""Calls whose client has left, as gRPC tells it to a server that writes before it knows; or whose writes fail in another way."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio


class Leaving(grpc.aio.ServerInterceptor):
    """From their write number `last` on, writes of calls of a method raise `error`; other calls are as they are. left: so many did."""

    def __init__(self, method: str, last: int, error: type[Exception] = grpc.aio.InternalError) -> None:
        self._method, self._last, self.error = method, last, error
        self.left = 0

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if not details.method.endswith(f"/{self._method}"):
            return handler

        async def serve(requests: object, context: object) -> None:
            await handler.stream_stream(requests, _Left(self, context, self._last))

        return grpc.stream_stream_rpc_method_handler(serve, handler.request_deserializer, handler.response_serializer)


class _Left:
    """The call as the server has it; everything but `write` is gRPC's own."""

    def __init__(self, leaving: Leaving, context: Any, writes: int) -> None:
        self._leaving, self._context, self._writes = leaving, context, writes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: object) -> None:
        self._writes -= 1
        if self._writes < 0:
            self._leaving.left += 1
            raise self._leaving.error("a write failed, says a test")
        await self._context.write(message)
