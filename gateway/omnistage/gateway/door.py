"""The objects that all endpoints share: the client of the router, the pipelines on offer, the visitors, and the metrics."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from dataclasses import dataclass
from typing import Any

import structlog
from starlette.datastructures import Headers
from starlette.requests import Request

from omnistage.client import AsyncOmni
from omnistage.client.connection import Connection, Found
from omnistage.client.errors import BadRequestError
from omnistage.gateway.accounts import GatewayMetrics, HttpAccount
from omnistage.gateway.failure import ApiError
from omnistage.gateway.fetching import Fetcher
from omnistage.gateway.film_jobs import Jobs
from omnistage.gateway.offer import Offer, Views
from omnistage.gateway.settings import GatewaySettings
from omnistage.host.token import Token

log = structlog.get_logger(__name__)

START_PATIENCE_S = 20.0
"""Seconds that a request waits for a pipeline that is starting, before its client is told when to ask again."""

KEY_HEADERS = ("x-api-key", "api-key")
"""Headers that may carry a key instead of `Authorization: Bearer KEY`, which OpenAI's clients send."""


@dataclass(frozen=True, slots=True)
class Visitor:
    """The sender of a request. omni: asks the router with the sender's key. account: of the request. name: the sender's, by which
    films, texts and other data are kept apart. host: a name of the sender's host; all senders of a host share what one host gets."""

    omni: AsyncOmni
    account: HttpAccount
    name: str
    host: str


class Door:
    """The objects that all endpoints share. It must be made on the event loop that serves. serves: whether requests are answered; False
    while the gateway ends. running: how many requests run."""

    def __init__(self, settings: GatewaySettings, metrics: GatewayMetrics, token: Token | None = None) -> None:
        """token: shown to the router; see Views."""
        self.settings, self.metrics = settings, metrics
        # No retries, because clients over HTTP retry by themselves, as OpenAI's do. But they give up before a pipeline has started.
        connection = Connection(Found(settings.router, is_named=True), start_patience_s=START_PATIENCE_S, warn=_warn)
        self.omni = AsyncOmni.over(connection, None, max_retries=0)
        self.offer = Offer(self.omni, settings.model_names, settings.voice_names)
        self.fetcher = Fetcher(settings.media_hosts, settings.max_message_bytes)
        self.serves = False
        self.running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._views = Views(self.omni, token)
        self.jobs = Jobs(self._views, settings, metrics)

    async def open(self) -> None:
        """Start the jobs of films; call it before any request comes. Raises StartError."""
        await self.jobs.open()

    async def close(self) -> None:
        await self.jobs.close()
        await self.omni.close()

    def visitor(self, headers: Headers, account: HttpAccount) -> Visitor:
        """The sender of a request, named by the key in the headers, or without a key by the host in the account. Raises ApiError 401 for
        a text that cannot be a key."""
        key = _key(headers)
        # The host is hashed with a secret, so a stranger cannot send a key that gives the same name.
        name, host = key or self._hashed(account.host), self._hashed(f"host {account.host}")
        if key:
            account.client = key_name(key)
        try:
            return Visitor(self._views.of(name, host), account, self._hashed(f"visitor {name}"), host)
        except BadRequestError as error:
            fault = error.message.removeprefix("api_key: ")
            raise ApiError(401, f"the API key {fault}", code="invalid_api_key") from None

    def _hashed(self, name: str) -> str:
        """A hash of a name. All processes with the same folder of films make the same hash of it, so each knows who asked for a film."""
        return hmac.new(self.jobs.store.secret, name.encode(), hashlib.sha256).hexdigest()

    def enter(self) -> None:
        """Count a request that begins."""
        self.running += 1
        self._idle.clear()
        self.metrics.inflight.set(self.running)

    def leave(self) -> None:
        """Count a request that has ended."""
        self.running -= 1
        self.metrics.inflight.set(self.running)
        if not self.running:
            self._idle.set()

    async def idle(self) -> None:
        """Wait until no request runs."""
        await self._idle.wait()

    def options(self, visitor: Visitor, **values: Any) -> dict[str, Any]:
        """Options of a call: the values of `values` that are not None, the request's name, and the time limit of the answer."""
        options = {name: value for name, value in values.items() if value is not None}
        return {"request_id": visitor.account.request_id, "timeout_s": self.settings.session_limit, **options}


def visitor_of(request: Request) -> Visitor:
    """The sender of a request, whom the guard has found."""
    visitor: Visitor = request.state.visitor
    return visitor


def host_of(client: tuple[str, int] | None) -> str:
    """The host at the other end of a connection; "local" if it has no address."""
    return client[0] if client else "local"


def _key(headers: Headers) -> str | None:
    """The key in the headers; None if there is none."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return next((value for value in map(headers.get, KEY_HEADERS) if value), None)


def key_name(key: str) -> str:
    """The name by which the router's log shows this key."""
    return f"key:{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def _warn(message: str) -> None:
    log.warning("key.unencrypted", message=message)
