"""A collector of spans, as OpenTelemetry's: it speaks OTLP over gRPC, keeps what comes, and may be one that never answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from helpers.ports import take_address

LIMIT_S = 60.0

Response = trace_service_pb2.ExportTraceServiceResponse


@dataclass(frozen=True)
class Event:
    name: str
    at_ns: int
    attributes: Mapping[str, Any]


@dataclass(frozen=True)
class CollectedSpan:
    """One span. service: its process's `service.name`. ids: hex digits; parent: empty for none. error: the description of its status, empty
    where it has none."""

    service: str
    name: str
    trace_id: str
    id: str
    parent: str
    begun_ns: int
    ended_ns: int
    attributes: Mapping[str, Any]
    events: Sequence[Event]
    error: str
    resource: Mapping[str, Any]

    def event(self, name: str) -> Event:
        (found,) = [event for event in self.events if event.name == name]
        return found

    def holds(self, other: CollectedSpan) -> bool:
        """Whether the other one began and ended while this one ran."""
        return self.begun_ns <= other.begun_ns <= other.ended_ns <= self.ended_ns


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """url: for `--otlp`. spans: all that came."""

    def __init__(self, *, silent: bool) -> None:
        self._silent = silent
        self._over = threading.Event()
        self._came = threading.Condition()
        self.url = ""
        self.spans: list[CollectedSpan] = []
        self.asked = threading.Event()
        """Set when the first call came."""

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.asked.set()
        if self._silent:
            self._over.wait()
        with self._came:
            self.spans += list(_spans(request))
            self._came.notify_all()
        return Response()

    def wait_for(self, enough: Callable[[Sequence[CollectedSpan]], bool]) -> list[CollectedSpan]:
        """The spans, when there are enough. Raises AssertionError with those that are there after a bounded time."""
        with self._came:
            assert self._came.wait_for(lambda: enough(self.spans), LIMIT_S), [(span.service, span.name) for span in self.spans]
            return list(self.spans)

    def of(self, service: str, name: str) -> list[CollectedSpan]:
        """Those of one kind, in the order in which they began."""
        found = [span for span in self.spans if (span.service, span.name) == (service, name)]
        return sorted(found, key=lambda span: span.begun_ns)

    def one(self, service: str, name: str) -> CollectedSpan:
        (found,) = self.of(service, name)
        return found

    def below(self, span: CollectedSpan) -> dict[str, CollectedSpan]:
        """The spans right below one, by their names, of its own process."""
        return {other.name: other for other in self.spans if other.parent == span.id and other.service == span.service}

    def release(self) -> None:
        """Whoever was never answered is, now."""
        self._over.set()


@contextmanager
def collector(*, silent: bool = False) -> Iterator[Collector]:
    """One that listens. silent: it takes calls, and answers none before the end."""
    running = Collector(silent=silent)
    server = grpc.server(ThreadPoolExecutor(8))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(running, server)
    address = take_address()
    server.add_insecure_port(address)
    server.start()
    running.url = f"http://{address}"
    try:
        yield running
    finally:
        running.release()
        server.stop(None).wait()


def _spans(request: Any) -> Iterator[CollectedSpan]:
    for process in request.resource_spans:
        resource = _attributes(process.resource.attributes)
        for scope in process.scope_spans:
            for span in scope.spans:
                yield CollectedSpan(
                    service=str(resource["service.name"]),
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    id=span.span_id.hex(),
                    parent=span.parent_span_id.hex(),
                    begun_ns=span.start_time_unix_nano,
                    ended_ns=span.end_time_unix_nano,
                    attributes=_attributes(span.attributes),
                    events=[Event(event.name, event.time_unix_nano, _attributes(event.attributes)) for event in span.events],
                    error=span.status.message if span.status.code == trace_pb2.Status.STATUS_CODE_ERROR else "",
                    resource=resource,
                )


def _attributes(pairs: Sequence[common_pb2.KeyValue]) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "") for pair in pairs}
