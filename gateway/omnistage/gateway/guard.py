"""Guards all endpoints: first checks who calls and how large the body is, and at the end of each request writes a line of the log."""

from __future__ import annotations

import asyncio
import codecs
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

import structlog
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omnistage.gateway import accounts
from omnistage.gateway.accounts import ANSWERS, HeldMemory, HttpAccount, Ledger
from omnistage.gateway.answering import BrokenOff
from omnistage.gateway.door import Door, host_of
from omnistage.gateway.failure import ApiError, is_ollama
from omnistage.gateway.port import HEAD_BYTES
from omnistage.gateway.unpacking import Unpacker
from omnistage.host.addresses import host_and_port, is_loopback, network_of
from omnistage.host.background import end_tasks

T = TypeVar("T")

log = structlog.get_logger(__name__)

BODY_LIMIT_S = 60.0
"""Seconds in which a body must arrive."""

MAX_PARTS = 262_144
"""The most characters of JSON's syntax in a body, because each may become an object. The largest allowed conversation needs a tenth of
them; the others may be in its texts, which may be JSON themselves."""

PIECE_BYTES = 64 << 10
"""The most bytes of an answer that are sent at once: the next ones wait until the client has read."""

LARGE_BYTES = 1 << 20
"""A body of more bytes is parsed on a thread, so that the event loop goes on."""

PART_BYTES = 96
"""Bytes of memory that are counted for each of these characters."""

LINE_BYTES = 4
"""Bytes of a header line in addition to its name and its value."""

PROBES = frozenset({"/health", "/ready"})
"""Paths that are answered under any name of this host, such as its IP address, whatever hosts are allowed, because the answers have no
secrets."""

SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing: a browser shows their answers to no page of another host."""

WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
"""Methods whose requests may have a body."""

SHOWN_HEADERS = ("x-request-id", "retry-after", "x-should-retry")
"""Headers of an answer that a page of an allowed origin may read."""

LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
"""Names of this machine, by which a gateway on a loopback address may be called."""


CLOSING = {"Connection": "close"}

BUG = ApiError(500, "the gateway failed; its log has the cause", code="internal")


class HttpGuard:
    """The outermost app. It passes requests on to `app` when their whole body has come. Into `scope["state"]` it puts the account, the
    parsed JSON, and, for the paths of ANSWERS, the call."""

    def __init__(self, app: ASGIApp, door: Door) -> None:
        self._door = door
        settings = door.settings
        self._is_local = is_loopback(host_and_port(settings.address)[0])
        host = settings.address.rpartition(":")[0].lower()
        local = LOCAL_NAMES | {host} if self._is_local else frozenset()
        self._hosts = frozenset(map(str.lower, settings.allowed_hosts)) | local
        self._origins = frozenset(origin.rstrip("/").lower() for origin in settings.allowed_origins)
        self._app = self._readable(app)
        self._ledgers = [Ledger(accounts.BODIES_BYTES), Ledger(accounts.SMALL_BODIES_BYTES)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        account = HttpAccount(scope["method"], scope["path"])
        scope.setdefault("state", {})["account"] = account
        answer = AnswerSender(account, send, lambda error, send: self._readable(error.response_at(scope["path"]))(scope, receive, send))
        if is_ollama(scope["path"]):
            scope["headers"] = _as_json(scope["headers"])
        request = Request(scope, receive)
        account.client = host_of(scope.get("client"))
        account.host = network_of(account.client)
        account.note_name(request.headers.get("x-client-request-id", ""))
        self._door.enter()
        try:
            try:  # An ApiError becomes the answer, unless an answer has begun.
                await self._pass_on(request, answer)
            except ApiError as error:
                if answer.has_begun:
                    raise
                account.note_failure(error)
                await self._readable(error.response_at(scope["path"]))(scope, receive, answer.send)
        except BrokenOff:
            raise
        except (ClientDisconnect, asyncio.CancelledError) as error:
            account.note_leave()
            if isinstance(error, asyncio.CancelledError):
                raise
        except Exception:
            account.reason = BUG.reason
            log.exception("http.bug", request_id=account.request_id, path=account.path[:256])
            if answer.has_begun:
                raise
            await BUG.response_at(scope["path"])(scope, receive, answer.send)
        finally:
            self._door.leave()
            account.endpoint = getattr(scope.get("route"), "path_format", "")
            account.end(self._door.metrics)

    async def _pass_on(self, request: Request, answer: AnswerSender) -> None:
        """Check the request and read its body, then let the app answer it; when the client leaves, the app is cancelled. Raises ApiError,
        ClientDisconnect."""
        state, receive = request.scope["state"], request.receive
        account: HttpAccount = state["account"]
        self._check(request)
        if account.path.startswith(ANSWERS):
            state["call"] = self._door.call(request.headers, account)
        body = _Body(request.headers, self._door.settings.max_message_bytes, account.host, self._ledgers)
        answer.memory = body.memory
        account.at_end.append(body.memory.free)
        receive_again = await body.read(receive)
        state["json"] = body.json
        account.on_copied = body.give_up
        answering = asyncio.ensure_future(self._app(request.scope, receive_again, answer.send))
        leaving = asyncio.create_task(_wait_for_disconnect(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not (answering.done() or answer.has_ended):
                raise ClientDisconnect
            await answering
        finally:
            await end_tasks((answering, leaving))

    def _readable(self, app: ASGIApp) -> ASGIApp:
        """Wrap `app` so that its answers have the headers with which browsers let pages of allowed origins read them."""
        if not self._origins:
            return app
        return CORSMiddleware(
            app,
            allow_origins=list(self._origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=SHOWN_HEADERS,
            allow_private_network=True,
        )

    def _check(self, request: Request) -> None:
        """Raises ApiError if the headers are too large or name two lengths, if a method has a body that takes none, if the request is for
        another host or from another host's page, or if the gateway is ending."""
        if sum(len(name) + len(value) + LINE_BYTES for name, value in request.headers.raw) > HEAD_BYTES:
            raise ApiError(431, f"the headers have more than {HEAD_BYTES >> 10} KiB", code="headers_too_large")
        if "content-length" in request.headers and "transfer-encoding" in request.headers:
            # A proxy on the way may use the other length, and then treat the rest of the body as another client's request.
            raise ApiError(400, "the body has two lengths", code="invalid_http", headers=CLOSING)
        has_body = request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
        if has_body and request.method not in WITH_BODY and not is_ollama(request.scope["path"]):  # Ollama deletes by a body.
            # Nothing reads it, but it would be held, and counted, for as long as the request is answered.
            raise ApiError(400, f"a {request.method[:16]} has no body here", code="body_not_taken", headers=CLOSING)
        path = request.scope["path"]
        if path in PROBES:
            return
        self._check_host(request.headers.get("host", "").lower())
        self._check_origin(request)
        if not self._door.serves and path.startswith(ANSWERS):
            raise ApiError(503, "this gateway is ending", code="draining", reason="DRAINING", retry_after_s=1.0)

    def _check_host(self, host: str) -> None:
        """Raises ApiError if the request calls this gateway by another host's name. Such a name can resolve to this machine; then a browser
        would let that host's page read our answers."""
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if not self._hosts or name in self._hosts or (self._is_local and name.endswith(".localhost")):
            return
        hint = "Call it by a name of this machine, or start it with OMNISTAGE_ALLOWED_HOSTS=NAME, or its --allowed-hosts NAME."
        raise ApiError(403, f"this gateway is not called {name[:128] or 'nothing'}", code="host_not_allowed", hint=hint)

    def _check_origin(self, request: Request) -> None:
        """Raises ApiError for requests of other hosts' pages. A browser sends simple requests without asking first (no preflight); they
        have the header Origin, or in some browsers only Sec-Fetch-Site."""
        headers = request.headers
        origin, host = headers.get("origin", "").lower(), headers.get("host", "").lower()
        if not origin:
            if request.method in SAFE or headers.get("sec-fetch-site", "none") in ("same-origin", "none"):
                return
            origin = "another host"
        elif origin in self._origins or (host and origin.partition("://")[2] == host):
            return
        hint = "To let pages of another host call it start it with OMNISTAGE_ALLOWED_ORIGINS=ORIGIN, or its --allowed-origins ORIGIN."
        raise ApiError(403, f"pages of {origin[:128]} may not call this gateway", code="origin_not_allowed", hint=hint)


class _Body:
    """Reads, unpacks and measures a body before anything parses it. max_bytes: its largest allowed size, packed and unpacked. memory:
    counts what the request holds, and is to be freed at the end. json: its parsed value; None: it is no JSON."""

    def __init__(self, headers: Headers, max_bytes: int, host: str, ledgers: Sequence[Ledger]) -> None:
        """host: the client for which its memory is counted. ledgers: that of all bodies, and the reserve of small ones. Raises ApiError."""
        length = headers.get("content-length", "")
        size = int(length) if length.isascii() and length.isdecimal() else 0
        if size > max_bytes:
            raise _too_large(max_bytes)
        kind = headers.get("content-type", "").partition(";")[0].lower()
        self._unpacker = Unpacker(headers.get("content-encoding", ""))
        is_small = bool(length) and size <= accounts.SMALL_BYTES and not self._unpacker.is_packed
        self.memory = HeldMemory(ledgers if is_small else ledgers[:1], host)
        self._is_json = not kind.strip() or "json" in kind  # A body without a type counts as JSON.
        self._max_bytes = max_bytes
        self._messages: list[Message] = []
        self._is_copied = False
        self.json: Any = None

    async def read(self, receive: Receive) -> Receive:
        """Read the whole body. Returns a `receive` of ASGI, which gives the app the body, and later the message that the client has left.
        Raises ApiError, ClientDisconnect."""
        body = await self._collect(receive)
        if self._is_json:
            body = body.removeprefix(codecs.BOM_UTF8)  # Some programs begin a file with it, and send that.
        if self._is_json and body:
            syntax_count = await _apply(_count_syntax, body)
            if syntax_count > MAX_PARTS:
                raise ApiError(400, f"the body has more than {MAX_PARTS} values", code="too_many_values")
            self.memory.take(syntax_count * PART_BYTES)
            self.json = await _apply(_parse_json, body)
        self._messages.append({"type": "http.request", "body": body, "more_body": False})

        async def receive_again() -> Message:
            return self._messages.pop() if self._messages else await receive()

        return receive_again

    async def _collect(self, receive: Receive) -> bytes:
        """Receive all pieces of the body, unpack them, and count their memory. Raises ApiError, ClientDisconnect."""
        pieces: list[bytes] = []
        packed_size, size, has_more = 0, 0, True
        deadline_s = time.monotonic() + BODY_LIMIT_S
        while has_more:
            try:
                async with asyncio.timeout(deadline_s - time.monotonic()):
                    message = await receive()
            except TimeoutError:
                raise ApiError(408, f"the body did not arrive within {BODY_LIMIT_S:g} s", code="timeout") from None
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            packed_size += len(message.get("body", b""))
            for piece in self._unpacker.unpack(message.get("body", b"")):
                size += len(piece)
                if max(size, packed_size) > self._max_bytes:
                    raise _too_large(self._max_bytes)
                self.memory.take(len(piece))
                pieces.append(piece)
                if self._unpacker.is_packed:
                    await asyncio.sleep(0)  # Other requests have their turn: unpacking takes longer than receiving.
            has_more = message.get("more_body", False)
        if packed_size:
            self._unpacker.check_end()
        return b"".join(pieces)

    def give_up(self, copied_bytes: int) -> None:
        """Forget the body, of which everything that the answer needs was copied, and count the bytes of the copy. Each further call counts
        the bytes of one more copy. Raises ApiError if there is no room for them."""
        if not self._is_copied:
            self._is_copied = True
            self._messages.clear()
            if isinstance(self.json, dict):
                self.json.clear()  # Whoever refers to it has no more use for its values.
            self.memory.resize(copied_bytes)
        else:
            self.memory.take(copied_bytes)


class AnswerSender:
    """Sends an answer, and notes its begin in the account. A large body goes out piece by piece, as the client reads it; until then its
    memory counts like that of a request. refuse: sends an error in place of the answer, by the given function. memory: counts the memory;
    None: nothing is counted yet. has_begun, has_ended: whether its head, and whether all of it was sent."""

    def __init__(self, account: HttpAccount, send: Send, refuse: Callable[[ApiError, Send], Awaitable[None]]) -> None:
        self._account, self._send, self._refuse = account, send, refuse
        self._start: Message | None = None
        self._is_refused = False
        self.memory: HeldMemory | None = None
        self.has_begun = self.has_ended = False

    async def send(self, message: Message) -> None:
        """Send a message of ASGI. If there is no room for the body, an error is sent in place of the answer, if that has not begun."""
        if self._is_refused:
            return
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self._account.request_id.encode())]
            self._start = message
            if not any(name == b"content-length" for name, _ in message["headers"]):
                await self._begin()  # Otherwise the body follows at once, and may find no room.
            return
        body = message.get("body", b"")
        counted_bytes = len(body) if len(body) > PIECE_BYTES and self.memory is not None else 0
        try:
            self._take(counted_bytes)
        except ApiError as error:
            if self.has_begun:
                raise
            self._start, self._is_refused = None, True
            self._account.note_failure(error)
            await self._refuse(error, AnswerSender(self._account, self._send, self._refuse).send)
            self.has_ended = True
            return
        try:
            await self._begin()
            last_piece_at = max(len(body) - 1, 0) // PIECE_BYTES * PIECE_BYTES
            for at in range(0, last_piece_at, PIECE_BYTES):
                await self._send({**message, "body": body[at : at + PIECE_BYTES], "more_body": True})
            await self._send({**message, "body": body[last_piece_at:]})
            self.has_ended = not message.get("more_body", False)
        finally:
            self._take(-counted_bytes)

    async def _begin(self) -> None:
        """Send the head, if it has not been sent."""
        if self._start is not None:
            start, self._start = self._start, None
            self.has_begun = True
            self._account.note_begin(start["status"])
            await self._send(start)

    def _take(self, size_bytes: int) -> None:
        """Count more bytes, or fewer. Raises ApiError if there is no room for more."""
        if self.memory is not None and size_bytes:
            self.memory.resize(self.memory.held_bytes + size_bytes)


def _as_json(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers of a body of JSON. Ollama reads every body as JSON, and the commands in its documents give no type, so that curl names
    another one. A page of another host gains nothing by that: `_check_origin` asks for no type."""
    return [*((name, value) for name, value in headers if name != b"content-type"), (b"content-type", b"application/json")]


async def _wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client has left, or its whole answer was sent."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _apply(function: Callable[[bytes], T], body: bytes) -> T:
    """Return `function(body)`. For a large body the function runs on a thread, so that other requests go on."""
    return await asyncio.to_thread(function, body) if len(body) > LARGE_BYTES else function(body)


def _count_syntax(body: bytes) -> int:
    """The number of characters of JSON's syntax in a body, see `MAX_PARTS`."""
    return sum(map(body.count, (b",", b":", b"[", b"{")))


def _parse_json(body: bytes) -> Any:
    """Parse JSON. Python's own parser is not used: it accepts much that is no JSON, such as NaN, or halves of UTF-16 pairs, which no
    text can hold. Raises ApiError."""
    if b"\0" in body[:4]:  # No JSON in UTF-8 has a zero, and each in UTF-16 or UTF-32 has one here (RFC 4627, section 3).
        hint = "Send it in UTF-8."
        raise ApiError(400, "the body is UTF-16 or UTF-32, and JSON is UTF-8", code="invalid_json", hint=hint)
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is no JSON: {error}", code="invalid_json", reason="BAD_REQUEST") from None


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body has more than {max_bytes >> 20} MiB", code="too_large", hint="Send less, or smaller media.")
