"""Spans: the work of one process for one request, as part of a trace. The classes here are for a process that traces nothing; `otlp` has
the classes whose spans go to a collector, and `process.tracing` chooses. docs/tracing.md explains the spans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Metadata = Sequence[tuple[str, str]]
"""Metadata of a call: `traceparent` and `tracestate` of W3C Trace Context, or nothing."""

Value = str | bool | int | float
Attributes = Mapping[str, Value]

NO_ATTRIBUTES: Attributes = {}


class Span:
    """The work of one process for one request. This class is for a process that traces nothing: it only passes on the trace context of the
    caller.

    metadata: sent with the calls that are part of the work. trace_id: 32 hex digits; empty if nothing is recorded. All times are in
    time.monotonic() seconds.
    """

    trace_id = ""

    def __init__(self, metadata: Metadata) -> None:
        self.metadata = metadata

    def event(self, name: str, attributes: Attributes = NO_ATTRIBUTES, *, at_s: float | None = None) -> None:
        """Note an event. at_s: its time; None: now."""

    def phase(self, name: str, begun_s: float, ended_s: float, attributes: Attributes = NO_ATTRIBUTES, *, reason: str = "OK") -> None:
        """Add a finished part: a span of its own below this one. reason: how it ended, as in `end`."""

    def end(self, reason: str, attributes: Attributes = NO_ATTRIBUTES) -> None:
        """End the span. reason: OK, CANCELLED, INTERNAL or a name in ErrorReason; any but the first two is an error."""


class Tracer:
    """Begins spans. This one begins spans that record nothing."""

    def begin(self, name: str, parent: Metadata, attributes: Attributes = NO_ATTRIBUTES) -> Span:
        """Begin a span. parent: metadata of the call that the span answers; without a trace context in it, the span begins a trace."""
        return Span(parent)
