"""Limits the open calls of each client at a router; health checks have a limit of their own. A request must also arrive in time.

gRPC itself limits only the calls of all clients together. Calls that stay open, such as a watch of the health or a call whose request never
comes, would soon take all of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from grpc_health.v1.health import SERVICE_NAME as HEALTH

from omnistage.host.places import Places, Refused
from omnistage.router.admission import overload_error
from omnistage.router.clients import Callers
from omnistage.wire.calls import as_stream
from omnistage.wire.limits import MAX_CALLS

MAX_OPEN = MAX_CALLS * 3 // 4
"""Largest number of open calls of all clients together. It is below gRPC's own limit, so that the gate can refuse further calls with a
reason."""

MAX_HEALTH = MAX_CALLS // 16
"""Largest number of open calls of the health service's Check, and of its Watch."""

REQUEST_LIMIT_S = 60.0
"""Time for a request to arrive: 64 MiB at 9 Mbit/s."""

if TYPE_CHECKING:  # At run time gRPC's classes take no type arguments.
    Context = grpc.aio.ServicerContext[Any, Any]
    Handler = grpc.RpcMethodHandler[Any, Any]


class Gate(grpc.aio.ServerInterceptor):
    """An interceptor that takes a place for every call before its service runs, and refuses a call that gets none with OVERLOADED."""

    def __init__(self, callers: Callers | None = None, request_limit_s: float = REQUEST_LIMIT_S) -> None:
        self._callers = callers or Callers()
        self._request_limit_s = request_limit_s
        self._open = Places(MAX_OPEN)
        self._health = {f"/{HEALTH}/{method}": Places(MAX_HEALTH) for method in ("Check", "Watch")}

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]], details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(details)
        return handler and self._gated(handler, self._health.get(details.method, self._open))

    def _gated(self, handler: Handler, places: Places) -> Handler:
        """Wrap a handler so that it holds one of `places` for the caller while a call runs, and ends a call whose request does not come in
        time."""

        @contextmanager
        def place(context: Context) -> Iterator[None]:
            try:
                ticket = places.take(self._callers.client_of(context))
            except Refused as refused:
                raise overload_error(f"too many calls are open: {refused}") from None
            try:
                yield
            finally:
                places.leave(ticket)

        return as_stream(handler, place, self._request_limit_s)
