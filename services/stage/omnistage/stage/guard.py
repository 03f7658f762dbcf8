"""Refuses calls that do not show the token of the stack. Only calls of health and reflection need no token, up to a number of open calls.

A stage without a token is open, and then it listens on loopback addresses only. Every call becomes a stream, as in wire/calls.py.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import structlog
from grpc_health.v1.health import SERVICE_NAME as HEALTH_NAME

from omnistage.host.addresses import host_and_port, is_loopback
from omnistage.host.errors import StartError
from omnistage.v1 import stage_pb2
from omnistage.wire.calls import as_stream, leave_nothing, write
from omnistage.wire.errors import StageError, abort
from omnistage.wire.token import KEY, VARIABLE, Token

log = structlog.get_logger(__name__)

OPEN_TO_ALL = (HEALTH_NAME, "grpc.reflection.v1alpha.ServerReflection", "grpc.reflection.v1.ServerReflection")
"""Services that need no token; every other service needs it, channelz too."""

RUN = f"/{stage_pb2.DESCRIPTOR.services_by_name['StageService'].full_name}/Run"

REFUSAL_LIMIT_S = 2.0
"""Seconds for the half-close of a refused caller, which holds only its stream meanwhile."""

MAX_TOKENLESS = 256
"""Largest number of open calls of one method without the token. Each method has its own count, so that watchers of the health take no room
from callers that check it. Sessions, and callers that show the token, are not counted."""

REQUEST_LIMIT_S = 2.0
"""Seconds for the request of a call without the token, if the call has exactly one request."""

TRUSTED_REQUEST_LIMIT_S = 30.0
"""Seconds for the request of a call with the token."""

if TYPE_CHECKING:  # At run time gRPC's classes take no type arguments.
    Context = grpc.aio.ServicerContext[bytes, bytes]
    Handler = grpc.RpcMethodHandler[Any, Any]


def refusal(shown: bool) -> StageError:
    """The error of a call without the right token. shown: whether the call had a token, but a wrong one."""
    fault = "the token of this call is not that of this stage" if shown else f"this stage takes calls with a token only (metadata {KEY})"
    return StageError("UNAUTHENTICATED", f"{fault}: all servers of a stack need the same {VARIABLE} or {VARIABLE}_FILE")


class Guard(grpc.aio.ServerInterceptor):
    """An interceptor that sees every call before its service does, and refuses calls without the right token. token: None: every caller is
    accepted."""

    def __init__(self, token: Token | None) -> None:
        self._token = token
        self._tokenless: Counter[str] = Counter()
        """Open calls without the token, by method."""

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]], details: grpc.HandlerCallDetails
    ) -> Handler | None:
        """The handler of a call: the service's own, or one that refuses the call; None if the server has no such method."""
        shown = [value for key, value in details.invocation_metadata or () if key == KEY]
        if self._token is None or (len(shown) == 1 and self._token.matches(shown[0])):
            handler = await continuation(details)
            return None if handler is None else as_stream(handler, lambda _: nullcontext(), TRUSTED_REQUEST_LIMIT_S)
        if details.method.removeprefix("/").partition("/")[0] in OPEN_TO_ALL:
            handler = await continuation(details)
            return None if handler is None else self._counted(details.method, handler)
        return self._refusing(details.method, refusal(bool(shown)))

    def _counted(self, method: str, handler: Handler) -> Handler:
        """The handler, limited to MAX_TOKENLESS calls at once. method: its full name."""

        @contextmanager
        def place(context: Context) -> Iterator[None]:
            if self._tokenless[method] >= MAX_TOKENLESS:
                raise StageError("OVERLOADED", f"{MAX_TOKENLESS} calls of {method} without a token are open at this stage")
            with self._one_more(method):
                yield

        return as_stream(handler, place, REQUEST_LIMIT_S)

    def _refusing(self, method: str, error: StageError) -> Handler:
        """A handler that ends a call with `error`, without using its messages. It serves every kind of call as a stream, because a stream
        begins without a message. A call of Run gets Ended before the status, because for a link a stream without Ended is a loss."""

        async def refuse(requests: object, context: Context) -> None:
            if method == RUN:
                await write(context, stage_pb2.RunResponse(ended=error.to_ended()).SerializeToString())
                if self._tokenless[RUN] < MAX_TOKENLESS:
                    with self._one_more(RUN):
                        await _half_close(context)
            await abort(context, error)

        return grpc.stream_stream_rpc_method_handler(leave_nothing(refuse))

    @contextmanager
    def _one_more(self, method: str) -> Iterator[None]:
        """Count a call of the method as open while the block runs."""
        self._tokenless[method] += 1
        try:
            yield
        finally:
            self._tokenless[method] -= 1


async def _half_close(context: Context) -> None:
    """Wait for the caller's half-close, at most for REFUSAL_LIMIT_S."""
    try:
        async with asyncio.timeout(REFUSAL_LIMIT_S):
            while await context.read() is not grpc.aio.EOF:  # type: ignore[comparison-overlap]
                pass
    except TimeoutError:
        log.debug("guard.no_half_close")


def check_open(address: str) -> None:
    """Raises StartError, with what to do, if a stage without a token may not listen at HOST:PORT: it may at a loopback address only."""
    if not is_loopback(host_and_port(address)[0]):
        raise StartError(
            f"{address} can be reached from other hosts, and without a token whoever reaches it may use this stage: set {VARIABLE} or "
            f"{VARIABLE}_FILE, the same for all servers of the stack, or listen on 127.0.0.1"
        )


def say_open(address: str) -> None:
    """Log that a stage listens at HOST:PORT without a token."""
    log.info("stage.open", address=address, why=f"no {VARIABLE}: every process of this host may call this stage")
