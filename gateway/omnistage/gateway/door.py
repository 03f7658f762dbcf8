"""The objects that all endpoints share: the client of the router, the pipelines on offer, the visitors, and the metrics."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import cached_property, partial
from typing import Annotated, Any, cast

import structlog
from fastapi import Depends, Request
from starlette.datastructures import Headers

from omnistage.client import AsyncOmni
from omnistage.client.connection import Connection, Found
from omnistage.client.errors import BadRequestError
from omnistage.gateway.accounts import Events, GatewayMetrics, HttpAccount, size_of
from omnistage.gateway.failure import ApiError
from omnistage.gateway.fetching import Fetch, Fetcher
from omnistage.gateway.film_jobs import Jobs
from omnistage.gateway.film_store import Store
from omnistage.gateway.kept import FILES_BYTES, ExpiringCache, StoredPicture, Transcripts
from omnistage.gateway.offer import Offer, view_of
from omnistage.gateway.settings import GatewaySettings
from omnistage.host.token import Token

log = structlog.get_logger(__name__)

START_PATIENCE_S = 20.0
"""Seconds that a request waits for a pipeline that is starting, before its client is told when to ask again."""

KEY_HEADERS = ("x-api-key", "api-key")
"""Headers that may carry a key instead of `Authorization: Bearer KEY`, which OpenAI's clients send."""


class HttpCall:
    """One request to an endpoint, and its sender. account: of the request. omni: asks the router with the sender's key. client: the
    sender's name, by which films, texts and other data are kept apart. host: a name of the sender's host; all senders of a host share what
    one host gets."""

    def __init__(self, door: Door, account: HttpAccount, omni: AsyncOmni, client: str, host: str) -> None:
        self.door, self.account = door, account
        self.omni, self.client, self.host = omni, client, host

    @cached_property
    def fetch(self) -> Fetch:
        """The function that fetches the media which the request names by URL."""
        return self.door.fetcher.of(self.account)

    def options(self, **values: Any) -> dict[str, Any]:
        """Options of a call of the client library: the values that are not None, the request's name, and the time limit of the answer."""
        options = {name: value for name, value in values.items() if value is not None}
        return {"request_id": self.account.request_id, "timeout_s": self.door.settings.session_limit, **options}

    def ask(self, stream: Callable[..., Events], *arguments: Any, **values: Any) -> Events:
        """The events of `stream`, a method of `omni`; the router is asked when the first of them is read. From now on the request holds, in
        place of its body, what the method has copied. values: see `options`. Raises OmniError, ApiError."""
        options = self.options(**values)
        events = stream(*arguments, **options)
        self.account.on_copied(size_of(arguments) + size_of(options))
        return self.account.noted(events)


async def call_of(request: Request) -> HttpCall:
    """The call that the guard has made of a request."""
    return cast(HttpCall, request.state.call)


async def door_of(request: Request) -> Door:
    """The door of the app that got a request."""
    return cast(Door, request.app.state.door)


ThisCall = Annotated[HttpCall, Depends(call_of)]
ThisDoor = Annotated["Door", Depends(door_of)]
"""Parameters of endpoints."""


class Door:
    """The objects that all endpoints share. It must be made on the event loop that serves. serves: whether requests are answered; False
    while the gateway ends. running: how many requests run. jobs: of films, from `open` on. pictures: those that have URLs."""

    def __init__(self, settings: GatewaySettings, metrics: GatewayMetrics, token: Token | None = None) -> None:
        """token: shown to the router; see `view_of`."""
        self.settings, self.metrics = settings, metrics
        # No retries, because clients over HTTP retry by themselves, as OpenAI's do. But they give up before a pipeline has started.
        connection = Connection(Found(settings.router, is_named=True), start_patience_s=START_PATIENCE_S, warn=_warn)
        self.omni = AsyncOmni.over(connection, None, max_retries=0)
        self.offer = Offer(self.omni, settings.model_names, settings.voice_names)
        self.fetcher = Fetcher(settings.media_hosts, settings.max_message_bytes)
        self.transcripts = Transcripts()
        self.pictures: ExpiringCache[StoredPicture] = ExpiringCache(FILES_BYTES)
        self.serves = False
        self.running = 0
        metrics.inflight.set_function(lambda: self.running)
        self._idle = asyncio.Event()
        self._idle.set()
        self._view = partial(view_of, self.omni, token)
        self._exits = AsyncExitStack()
        self._exits.push_async_callback(self.omni.close)

    async def open(self) -> None:
        """Go on with the jobs of films that an earlier process left; call it before any request is answered. Raises StartError."""
        self._store = await asyncio.to_thread(Store, self.settings.video_folder)
        self.jobs = Jobs(self._store, self._view, self.settings, self.metrics)
        self._exits.push_async_callback(self.jobs.close)
        await self.jobs.resume()

    async def close(self) -> None:
        """End all jobs of films; the next gateway with this folder goes on with them."""
        await self._exits.aclose()

    def call(self, headers: Headers, account: HttpAccount) -> HttpCall:
        """The call of a request. Its sender is named by the key in the headers, or without a key by the host in the account. Raises
        ApiError 401 for a text that cannot be a key."""
        key = _key(headers)
        # The host is hashed with a secret, so a stranger cannot send a key that gives the same name.
        name, host = key or self._hashed(account.host), self._hashed(f"host {account.host}")
        if key:
            account.client = f"key:{hashlib.sha256(key.encode()).hexdigest()[:16]}"  # As in the log of the router.
        try:
            return HttpCall(self, account, self._view(name, host), self._hashed(f"visitor {name}"), host)
        except BadRequestError as error:
            fault = error.message.removeprefix("api_key: ")
            raise ApiError(401, f"the API key {fault}", code="invalid_api_key") from None

    def _hashed(self, name: str) -> str:
        """A hash of a name. All processes with the same folder of films make the same hash of it, so each knows who asked for a film."""
        return hmac.new(self._store.secret, name.encode(), hashlib.sha256).hexdigest()

    def enter(self) -> None:
        """Count a request that begins."""
        self.running += 1
        self._idle.clear()

    def leave(self) -> None:
        """Count a request that has ended."""
        self.running -= 1
        if not self.running:
            self._idle.set()

    async def idle(self) -> None:
        """Wait until no request runs."""
        await self._idle.wait()


def host_of(client: tuple[str, int] | None) -> str:
    """The host at the other end of a connection; "local" if it has no address."""
    return client[0] if client else "local"


def _key(headers: Headers) -> str | None:
    """The key in the headers; None if there is none."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return next((value for value in map(headers.get, KEY_HEADERS) if value), None)


def _warn(message: str) -> None:
    log.warning("key.unencrypted", message=message)
