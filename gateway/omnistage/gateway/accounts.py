"""The costs of each request: its account, which becomes a line in the log and the metrics when it has ended, and the memory that it holds.

The memory has a bound for all requests and for each host. A request counts for its body and the values in it until the client library has
copied what it needs; from then on for these copies. docs/metrics.md explains the metrics. Their labels are endpoint and status, and never
the client."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial

import structlog
from prometheus_client import Counter as MetricCounter
from prometheus_client import Gauge, Histogram

from omnistage.client.events import AudioChunk, Done, Event, Failover, Picture, TextDelta
from omnistage.gateway.failure import OLLAMA, ApiError
from omnistage.host.metrics import new_registry
from omnistage.host.places import HOST_SHARE

log = structlog.get_logger(__name__)

ANSWERS = ("/v1/", OLLAMA)
"""Requests below these paths get a line in the log; the page and its files get none."""

CANCELLED_STATUS = 499
"""The status in the log and in the metrics for a client that left before the answer had a status."""

MAX_CHARACTERS = 128
"""The most characters of a client's own words that the log shows."""

LOGGED = ("method", "status", "client", "request_id", "client_request_id", "reason", "message", "field")
"""Fields of the log that are attributes of the account."""

LOGGED_OF_ANSWER = ("session_id", "pipeline", "finish_reason")
"""Fields of the log that are attributes of the answer's last event."""


Events = AsyncGenerator[Event, None]
"""The events of an answer."""


class HttpAccount:
    """The account of one request. endpoint: its route, without the parts that differ from call to call. client: the client's name in logs.
    host: the host or network that it comes from, as `network_of` names it. client_request_id: the client's own name for the request; None:
    it gave none. fields: as in `of_omni`, for the errors of the answer. at_end: functions to call when the request has ended; they free
    what it held. on_copied: called whenever the client library has copied what an answer needs, with the bytes of that copy."""

    def __init__(self, method: str, path: str) -> None:
        self.request_id = uuid.uuid4().hex
        self.method, self.path = method, path
        self.endpoint = ""
        self.client = self.host = ""
        self.client_request_id: str | None = None
        self.fields: Mapping[str, str] = {}
        self.status = 0  # of HTTP; 0: no answer has begun
        self.reason = "OK"
        self.message: str | None = None
        self.field: str | None = None
        self.at_end: list[Callable[[], None]] = []
        self.on_copied: Callable[[int], None] = lambda copied_bytes: None
        self._begin_s = time.perf_counter()
        self._first_byte_s: float | None = None
        self._ttft_s: float | None = None
        self._ttfa_s: float | None = None
        self._audio_s = 0.0
        self._pictures = 0
        self._failovers = 0
        self._tokens: int | None = None
        self._done: Done | None = None

    def note_event(self, event: Event) -> None:
        """Note an event of the answer; call it when the event comes from the router."""
        match event:
            case TextDelta():
                self._ttft_s = self._ttft_s or self._now_s
            case AudioChunk():
                self._ttfa_s = self._ttfa_s or self._now_s
                self._audio_s += event.duration_s
            case Picture():
                self._pictures += event.preview_step is None  # Previews do not count.
            case Failover():
                self._failovers += 1
            case Done():
                self._done = event
                if event.usage.completion_tokens is not None:
                    self._tokens = (self._tokens or 0) + event.usage.completion_tokens

    async def noted(self, events: Events) -> Events:
        """Yield the same events and note each of them; closing this generator closes `events`."""
        async with aclosing(events):
            async for event in events:
                self.note_event(event)
                yield event

    def note_failure(self, error: ApiError) -> None:
        """Note that the request ends with this error."""
        self.reason = error.reason
        if error.status >= 500:
            self.message = error.message
        else:  # Without the error's message, which may quote the request.
            self.field = error.param and error.param[:MAX_CHARACTERS]

    def note_leave(self) -> None:
        """Note that the client has left, or that the gateway has closed its connection."""
        self.reason, self.message = "CANCELLED", None
        self.status = self.status or CANCELLED_STATUS

    def note_name(self, name: str) -> None:
        """Note the client's own name for the request."""
        if name.isascii() and name.isprintable():
            self.client_request_id = name[:MAX_CHARACTERS] or None

    def note_begin(self, status: int) -> None:
        """Note that the first bytes of the answer are being sent. status: the HTTP status."""
        self.status = status
        self._first_byte_s = self._now_s

    def end(self, metrics: GatewayMetrics) -> None:
        """Write the line of the log and the metrics. To be called once."""
        for release in self.at_end:
            release()
        total_s = self._now_s
        endpoint = self.endpoint or "other"
        metrics.requests.labels(endpoint, str(self.status), self.reason).inc()
        metrics.duration.labels(endpoint).observe(total_s)
        if self._first_byte_s is not None:
            metrics.first_byte.labels(endpoint).observe(self._first_byte_s)
        if not self.path.startswith(ANSWERS):
            return
        times = {"ttft_s": self._ttft_s, "ttfa_s": self._ttfa_s, "audio_s": self._audio_s, "total_s": total_s}
        log.info(
            "http.done",
            path=self.path[:MAX_CHARACTERS],
            tokens=self._tokens,
            prompt_tokens=self._done and self._done.usage.prompt_tokens,
            pictures=self._pictures,
            failovers=self._failovers,
            **{name: getattr(self, name) for name in LOGGED},
            **{name: getattr(self._done, name, None) for name in LOGGED_OF_ANSWER},
            **{name: None if seconds is None else round(seconds, 4) for name, seconds in times.items()},
        )

    @property
    def _now_s(self) -> float:
        return time.perf_counter() - self._begin_s


_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10, 30, 60, 300)


class GatewayMetrics:
    """The metric families of the gateway, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = new_registry()
        self.inflight = Gauge("omnistage_gateway_inflight", "HTTP requests that run now.", registry=registry)
        self.connections = Gauge("omnistage_gateway_connections", "Connections that are open.", registry=registry)
        self.requests = MetricCounter(
            "omnistage_gateway_requests_total", "HTTP requests by how they ended.", ("endpoint", "status", "reason"), registry=registry
        )
        times = partial(Histogram, labelnames=("endpoint",), registry=registry, buckets=_SECONDS)
        self.duration = times("omnistage_gateway_request_seconds", "From request to the end of its answer.")
        self.first_byte = times("omnistage_gateway_first_byte_seconds", "From request to the first byte of its answer.")
        self.films = Gauge("omnistage_gateway_films", "Films that wait, and those that are made.", ("status",), registry=registry)
        self.film_bytes = Gauge("omnistage_gateway_film_bytes", "Bytes of all films that are kept.", registry=registry)
        self.films_ended = MetricCounter(
            "omnistage_gateway_films_ended_total", "Films by how they ended.", ("status", "code"), registry=registry
        )
        self.films_ended.labels("completed", "OK")


BODIES_BYTES = 256 << 20
"""The most bytes of memory for all requests."""

SMALL_BYTES = 64 << 10
SMALL_BODIES_BYTES = 32 << 20
"""The most bytes of memory for requests whose bodies have at most SMALL_BYTES, once BODIES_BYTES are taken."""

CHARACTER_BYTES = 4
"""The most bytes of a character."""


class Ledger:
    """Counts bytes of memory by host. limit_bytes: of all hosts together."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held_bytes = Counter[str]()

    @property
    def host_limit_bytes(self) -> int:
        """The most bytes that one host can have."""
        return int(HOST_SHARE * self._limit_bytes)

    def take(self, host: str, size_bytes: int) -> bool:
        """Count more bytes for a host. Returns False, and counts nothing, if there is no room for them. A host gets HOST_SHARE of what
        the others leave; a host that holds nothing gets HOST_SHARE of everything, as far as it is free."""
        host_bytes = self._held_bytes[host] + size_bytes
        free_bytes = self._limit_bytes - self._held_bytes.total() - size_bytes
        # A host gets its share of what the others leave, or, if it holds nothing, its share of everything.
        available_bytes = free_bytes + host_bytes if self._held_bytes[host] else self._limit_bytes
        if free_bytes < 0 or host_bytes > HOST_SHARE * available_bytes:
            return False
        self._held_bytes[host] += size_bytes
        return True

    def give_back(self, host: str, size_bytes: int) -> None:
        self._held_bytes[host] -= size_bytes
        if not self._held_bytes[host]:
            del self._held_bytes[host]


class HeldMemory:
    """The bytes of memory that one request holds. ledgers: asked for room in this order. host: for which they are counted. refusal: the
    text of the error where there is no room. Call `free` at the end."""

    def __init__(self, ledgers: Sequence[Ledger], host: str, refusal: str = "too many large requests are being read") -> None:
        self._ledgers, self._host, self._refusal = ledgers, host, refusal
        self._sizes = [0] * len(ledgers)

    def take(self, size_bytes: int) -> None:
        """Count more bytes. Raises ApiError: 413 if the request can never have so many, 503 if there is no room for them now."""
        for number, ledger in enumerate(self._ledgers):
            if ledger.take(self._host, size_bytes):
                self._sizes[number] += size_bytes
                return
        needed_bytes = self.held_bytes + size_bytes
        if needed_bytes > sum(ledger.host_limit_bytes for ledger in self._ledgers):
            text = (
                f"the request takes {needed_bytes >> 20} MiB of memory with the copies for each of its answers, more than there is for it"
            )
            raise ApiError(413, text, code="too_large", hint="Send fewer or smaller media, or ask for fewer answers at once.")
        raise ApiError(503, self._refusal, code="overloaded", reason="OVERLOADED", retry_after_s=1.0)

    def resize(self, size_bytes: int) -> None:
        """Hold so many bytes in place of those before. Raises ApiError if these are more and there is no room for them. Fewer bytes are
        always granted, even if other hosts have come and this host's share has become smaller."""
        growth_bytes = size_bytes - self.held_bytes
        if growth_bytes > 0:
            self.take(growth_bytes)
            return
        surplus_bytes = -growth_bytes
        for number, ledger in enumerate(self._ledgers):
            freed_bytes = min(surplus_bytes, self._sizes[number])
            ledger.give_back(self._host, freed_bytes)
            self._sizes[number] -= freed_bytes
            surplus_bytes -= freed_bytes

    @property
    def held_bytes(self) -> int:
        return sum(self._sizes)

    def free(self) -> None:
        """Give back all bytes."""
        self.resize(0)


def size_of(value: object) -> int:
    """The bytes of all texts and files within a value. Media that the gateway has fetched are not among them: the fetcher counts them."""
    match value:
        case str():
            return len(value) if value.isascii() else CHARACTER_BYTES * len(value)
        case bytes():
            return len(value)
        case Mapping():
            return sum(size_of(key) + size_of(part) for key, part in value.items())
        case list() | tuple():
            return sum(map(size_of, value))
    return 0
