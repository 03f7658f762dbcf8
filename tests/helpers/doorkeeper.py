"""A doorkeeper in front of a server of this process: it notes each call, and from which client it came."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio

from omnistage.router.admission import API_KEY


class Doorkeeper(grpc.aio.ServerInterceptor):
    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        key = dict(details.invocation_metadata or ()).get(API_KEY)
        self.calls.append((details.method.rpartition("/")[2], key))
        return await continuation(details)
