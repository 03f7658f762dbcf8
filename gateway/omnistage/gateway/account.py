"""The record of one request, written when the request has ended: one line in the log, and the metrics."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable
from typing import Any

import structlog

from omnistage.client.events import AudioChunk, Done, Event, Failover, Picture, TextDelta
from omnistage.gateway.failure import ApiError
from omnistage.gateway.held import size_of
from omnistage.gateway.metrics import GatewayMetrics

log = structlog.get_logger(__name__)

ANSWERS = "/v1/"
"""Requests below this path get a line in the log; the page and its files get none."""

LEFT = 499
"""The status in the log and in the metrics for a client that left before the answer had a status."""

MOST_CHARACTERS = 128
"""The most characters of a client's own words that the log shows."""


class HttpAccount:
    """The account of one request. endpoint: its route, without the parts that differ from call to call. client: the client's name in logs.
    host: the host or network that it comes from, as `network_of` names it. client_request_id: the client's own name for the request; None:
    it gave none. at_end: functions to call when the request has ended; they free what it held. on_copied: called whenever the client
    library has copied what an answer needs, with the bytes of that copy."""

    def __init__(self, method: str, path: str) -> None:
        self.request_id = uuid.uuid4().hex
        self.method, self.path = method, path
        self.endpoint = ""
        self.client = self.host = ""
        self.client_request_id: str | None = None
        self.status = 0  # of HTTP; 0: no answer has begun
        self.reason = "OK"
        self.message: str | None = None
        self.field: str | None = None
        self.at_end: list[Callable[[], None]] = []
        self.on_copied: Callable[[int], None] = lambda copied_bytes: None
        self._begun = time.perf_counter()
        self._first_byte_s: float | None = None
        self._ttft_s: float | None = None
        self._ttfa_s: float | None = None
        self._audio_s = 0.0
        self._pictures = 0
        self._failovers = 0
        self._tokens: int | None = None
        self._done: Done | None = None

    def saw(self, event: Event) -> None:
        """Note an event of the answer; call it when the event comes from the router."""
        match event:
            case TextDelta():
                self._ttft_s = self._ttft_s or self._now_s
            case AudioChunk():
                self._ttfa_s = self._ttfa_s or self._now_s
                self._audio_s += event.duration_s
            case Picture():
                self._pictures += event.preview_step is None
            case Failover():
                self._failovers += 1
            case Done():
                self._done = event
                if event.usage.completion_tokens is not None:
                    self._tokens = (self._tokens or 0) + event.usage.completion_tokens
            case _:
                pass

    def ask(self, stream: Callable[..., AsyncGenerator[Event, None]], *arguments: Any, **options: Any) -> AsyncGenerator[Event, None]:
        """The events of `stream(*arguments, **options)`, a method of the client library, which copies what it is given; each event is
        noted. From now on the request holds these copies in place of its body. Raises ApiError if there is no room for them."""
        events = stream(*arguments, **options)
        self.on_copied(size_of(arguments) + size_of(options))
        return self._noted(events)

    async def _noted(self, events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
        """Yield the same events and note each of them; closing this generator closes `events`."""
        try:
            async for event in events:
                self.saw(event)
                yield event
        finally:
            await events.aclose()

    def failed(self, error: ApiError) -> None:
        """Note that the request ends with this error."""
        self.reason = error.reason
        if error.status >= 500:
            self.message = error.message
        else:  # Without the error's message, which may quote the request.
            self.field = error.param and error.param[:MOST_CHARACTERS]

    def left(self) -> None:
        """Note that the client has left, or that the gateway has closed its connection."""
        self.reason, self.message = "CANCELLED", None
        self.status = self.status or LEFT

    def named(self, name: str) -> None:
        """Note the client's own name for the request."""
        if name.isascii() and name.isprintable():
            self.client_request_id = name[:MOST_CHARACTERS] or None

    def began(self, status: int) -> None:
        """Note that the first bytes of the answer are being sent. status: the HTTP status."""
        self.status = status
        self._first_byte_s = self._now_s

    def end(self, metrics: GatewayMetrics) -> None:
        """Write the line of the log and the metrics. To be called once."""
        for release in self.at_end:
            release()
        total_s = self._now_s
        endpoint = self.endpoint or "other"
        metrics.ended.labels(endpoint, str(self.status), self.reason).inc()
        metrics.duration.labels(endpoint).observe(total_s)
        if self._first_byte_s is not None:
            metrics.first_byte.labels(endpoint).observe(self._first_byte_s)
        if not self.path.startswith(ANSWERS):
            return
        done = self._done
        log.info(
            "http.done",
            method=self.method,
            path=self.path[:MOST_CHARACTERS],
            status=self.status,
            client=self.client,
            request_id=self.request_id,
            client_request_id=self.client_request_id,
            session_id=done and done.session_id,
            pipeline=done and done.pipeline,
            reason=self.reason,
            message=self.message,
            field=self.field,
            finish_reason=done and done.finish_reason,
            tokens=self._tokens,
            prompt_tokens=done and done.usage.prompt_tokens,
            ttft_s=_round_s(self._ttft_s),
            ttfa_s=_round_s(self._ttfa_s),
            audio_s=_round_s(self._audio_s),
            pictures=self._pictures,
            failovers=self._failovers,
            total_s=_round_s(total_s),
        )

    @property
    def _now_s(self) -> float:
        return time.perf_counter() - self._begun


def _round_s(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
