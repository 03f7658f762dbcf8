"""What every request passes first: who may call, how large a body is, and the one line of its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omnistage.gateway.account import Account
from omnistage.gateway.answering import BrokenOff
from omnistage.gateway.door import Door
from omnistage.gateway.failure import ApiError
from omnistage.host.addresses import host_and_port, is_loopback

log = structlog.get_logger(__name__)

BODY_LIMIT_S = 60.0
"""For a body to arrive."""

BODIES_BYTES = 256 << 20
"""Of all bodies that are being read or worked on."""

MAX_PARTS = 524_288
"""Of the signs that JSON is made of: each may become an object, which takes fifty times as much memory."""

LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


class Guard:
    """The outermost app. Requests of `app` have their whole body, and `scope["state"]["account"]`."""

    def __init__(self, app: ASGIApp, door: Door) -> None:
        self._app, self._door = app, door
        settings = door.settings
        self._is_local = is_loopback(host_and_port(settings.address)[0])
        own = settings.address.rpartition(":")[0].lower()
        local = LOCAL_NAMES | {own} if self._is_local else frozenset()
        self._hosts = frozenset(map(str.lower, settings.allowed_hosts)) | local
        self._origins = frozenset(origin.rstrip("/").lower() for origin in settings.allowed_origins)
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        account = Account(scope["method"], scope["path"])
        scope.setdefault("state", {})["account"] = account
        answer = _Answer(account, send)
        request = Request(scope, receive)
        self._door.enter()
        try:
            try:
                self._check(request)
                with self._held(request) as body:
                    await self._app(scope, await body.read(receive), answer.send)
            except ApiError as error:
                await answer.fail(error, scope, receive)
        except BrokenOff:
            raise
        except (ClientDisconnect, asyncio.CancelledError) as error:
            account.reason = "CANCELLED"
            if isinstance(error, asyncio.CancelledError):
                raise
        except Exception:
            account.reason = "INTERNAL"
            log.exception("http.bug", request_id=account.request_id, path=account.path[:256])
            raise
        finally:
            self._door.leave()
            account.end(self._door.metrics)

    def _check(self, request: Request) -> None:
        """Raises ApiError for a request that a page of another host has led here."""
        host = request.headers.get("host", "").lower()
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if self._hosts and name not in self._hosts and not (self._is_local and name.endswith(".localhost")):
            hint = "Call it by a name of this machine, or start it with --allowed-hosts NAME."
            raise ApiError(403, f"this gateway is not called {name[:128] or 'nothing'}", code="host_not_allowed", hint=hint)
        origin = request.headers.get("origin")
        if origin is None:
            return
        if origin.lower().partition("://")[2] != host and origin.lower() not in self._origins:
            hint = "Start it with --allowed-origins ORIGIN to let pages of another host call it."
            raise ApiError(403, f"pages of {origin[:128]} may not call this gateway", code="origin_not_allowed", hint=hint)
        if not self._door.serves and request.url.path.startswith("/v1/"):
            raise ApiError(503, "this gateway is ending", code="draining", reason="DRAINING", retry_after_s=1.0)

    @contextmanager
    def _held(self, request: Request) -> Iterator[_Body]:
        """The place of a body among all others. Raises ApiError."""
        most = self._door.settings.max_message_bytes
        told = request.headers.get("content-length", "")
        size = int(told) if told.isascii() and told.isdecimal() else 0
        if size > most:
            raise _too_large(most)
        body = _Body(most, is_json="json" in request.headers.get("content-type", ""), take=self._take)
        try:
            yield body
        finally:
            self._held_bytes -= body.size

    def _take(self, size: int) -> None:
        if self._held_bytes + size > BODIES_BYTES:
            raise ApiError(503, "too many large requests are being read", code="overloaded", reason="OVERLOADED", retry_after_s=1.0)
        self._held_bytes += size


class _Body:
    """Read before anybody parses it."""

    def __init__(self, most: int, *, is_json: bool, take: Callable[[int], None]) -> None:
        self._most, self._is_json = most, is_json
        self._take = take
        self.size = 0

    async def read(self, receive: Receive) -> Receive:
        """All of it; what gives it to the app, and then tells when the client leaves. Raises ApiError, ClientDisconnect."""
        pieces: list[bytes] = []
        more = True
        until = time.monotonic() + BODY_LIMIT_S
        while more:
            try:
                async with asyncio.timeout(until - time.monotonic()):
                    message = await receive()
            except TimeoutError:
                raise ApiError(408, f"the body did not arrive within {BODY_LIMIT_S:g} s", code="timeout") from None
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            piece = message.get("body", b"")
            if self.size + len(piece) > self._most:
                raise _too_large(self._most)
            self._take(len(piece))
            self.size += len(piece)
            pieces.append(piece)
            more = message.get("more_body", False)
        body = b"".join(pieces)
        if self._is_json and sum(map(body.count, (b",", b":", b"[", b"{"))) > MAX_PARTS:
            raise ApiError(400, f"the body has more than {MAX_PARTS} values", code="too_many_values", reason="BAD_REQUEST")
        whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Message:
            return whole.pop() if whole else await receive()

        return again


class _Answer:
    """What is sent, and what the account hears of it."""

    def __init__(self, account: Account, send: Send) -> None:
        self._account, self._send = account, send
        self.has_begun = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_begun = True
            self._account.began(message["status"])
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self._account.request_id.encode())]
        await self._send(message)

    async def fail(self, error: ApiError, scope: Scope, receive: Receive) -> None:
        self._account.failed(error)
        if self.has_begun:
            raise error
        await error.response(scope, receive, self.send)


def _too_large(most: int) -> ApiError:
    return ApiError(
        413, f"the body has more than {most >> 20} MiB", code="too_large", reason="BAD_REQUEST", hint="Send less, or smaller media."
    )
