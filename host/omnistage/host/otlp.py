"""Spans that go to a collector by OTLP over gRPC, in batches from a thread of their own. Needs the extra `otel`."""

from __future__ import annotations

import asyncio
import logging
import os
import time

import structlog
from opentelemetry.exporter.otlp.proto.grpc.exporter import InvalidCompressionValueException
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import OTEL_SERVICE_NAME
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span as OtelSpan
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from omnistage.host.background import start_spare, starting_spare
from omnistage.host.errors import StartError
from omnistage.host.spans import NO_ATTRIBUTES, Attributes, Metadata, Span, Tracer

log = structlog.get_logger(__name__)

MAX_WAITING = 2048
"""Ended spans that may wait to be sent. A further span replaces the oldest, and the log says so."""

EXPORT_LIMIT_S = 10.0
"""Seconds for one batch, all attempts together."""

FLUSH_S = 2.0
"""Seconds that an ending process waits at most for the collector to accept its last spans."""

CANCEL_S = 0.5
"""Further seconds for the sending thread, whose call was cancelled."""

NO_ERRORS = frozenset({"OK", "CANCELLED"})
"""Reasons that are no errors: a caller that leaves is no error of the stage that answered."""

_EXPORTER_LOG = "opentelemetry.exporter.otlp.proto.grpc.exporter"

_W3C = TraceContextTextMapPropagator()


class OtlpTracer(Tracer):
    """Records what the sampler chooses: by default everything except traces that their caller does not record."""

    def __init__(self, url: str, service: str) -> None:
        """url: http:// or https:// and HOST:PORT. service: name of this program in the traces. Raises StartError for an environment
        variable of OpenTelemetry that makes no sense."""
        self._url = url
        # The exporter logs every attempt as a warning, and a lost batch as an error: only the error is wanted.
        logging.getLogger(_EXPORTER_LOG).setLevel(logging.ERROR)
        attributes = {} if os.environ.get(OTEL_SERVICE_NAME) else {"service.name": service}
        try:
            self._exporter = OTLPSpanExporter(url, timeout=EXPORT_LIMIT_S)
            self._provider = TracerProvider(resource=Resource.create({**attributes, "process.pid": os.getpid()}), shutdown_on_exit=False)
            with starting_spare():
                self._provider.add_span_processor(BatchSpanProcessor(self._exporter, max_queue_size=MAX_WAITING))
        except (ValueError, RuntimeError, InvalidCompressionValueException) as error:
            raise StartError(f"--otlp: a variable of OpenTelemetry, whose names begin with OTEL_, is not right: {error}") from None
        self._tracer = self._provider.get_tracer("omnistage")

    def begin(self, name: str, parent: Metadata, attributes: Attributes = NO_ATTRIBUTES) -> Span:
        # Metadata may have a key several times; the propagator takes a list for each key.
        context = _W3C.extract({key: [value for name, value in parent if name == key] for key, _ in parent})
        return _Recorded(self, self._tracer.start_span(name, context, SpanKind.SERVER, attributes))

    def phase(self, name: str, parent: OtelSpan, begun_ns: int, ended_ns: int, attributes: Attributes, reason: str) -> None:
        """Add a finished span below another one. begun_ns, ended_ns: nanoseconds since 1970."""
        span = self._tracer.start_span(name, set_span_in_context(parent), attributes=attributes, start_time=begun_ns)
        _fail(span, reason)
        span.end(max(ended_ns, begun_ns))

    async def close(self) -> None:
        """Send the waiting spans, for FLUSH_S at most; then give up. A missing collector must not keep a process alive."""
        sending = start_spare("omnistage-last-spans", self._provider.shutdown)
        if sending.ident is None:  # No further thread could be started: the last spans are lost.
            return
        await asyncio.to_thread(sending.join, FLUSH_S)
        if sending.is_alive():
            log.warning("tracing.cut", collector=self._url, why=f"it did not take the last spans within {FLUSH_S:g} s")
            logging.getLogger(_EXPORTER_LOG).setLevel(logging.CRITICAL)  # The same failure was just logged.
            self._exporter.shutdown()
            await asyncio.to_thread(sending.join, CANCEL_S)


class _Recorded(Span):
    """A span of OpenTelemetry. The monotonic times of its phases and events become times of day: both clocks are read once, when the span
    begins."""

    def __init__(self, tracer: OtlpTracer, span: OtelSpan) -> None:
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, set_span_in_context(span))
        super().__init__(tuple(carrier.items()))
        self._tracer = tracer
        self._span = span
        self._begun_s, self._begun_ns = time.monotonic(), time.time_ns()
        context = span.get_span_context()
        self.trace_id = f"{context.trace_id:032x}" if context.is_valid else ""

    def event(self, name: str, attributes: Attributes = NO_ATTRIBUTES, *, at_s: float | None = None) -> None:
        self._span.add_event(name, attributes, None if at_s is None else self._ns(at_s))

    def phase(self, name: str, begun_s: float, ended_s: float, attributes: Attributes = NO_ATTRIBUTES, *, reason: str = "OK") -> None:
        if self._span.is_recording():
            self._tracer.phase(name, self._span, self._ns(begun_s), self._ns(ended_s), attributes, reason)

    def end(self, reason: str, attributes: Attributes = NO_ATTRIBUTES) -> None:
        self._span.set_attributes({"omnistage.reason": reason, **attributes})
        _fail(self._span, reason)
        self._span.end()

    def _ns(self, at_s: float) -> int:
        """A time.monotonic() time as nanoseconds since 1970; never before the span begins, nor after now."""
        return min(max(self._begun_ns + int((at_s - self._begun_s) * 1e9), self._begun_ns), time.time_ns())


def _fail(span: OtelSpan, reason: str) -> None:
    """Mark a span as failed, if the reason is an error."""
    if reason not in NO_ERRORS:
        span.set_attribute("error.type", reason)
        span.set_status(Status(StatusCode.ERROR, reason))
