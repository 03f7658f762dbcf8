"""What one process does for one request, as a trace has it. These spans are of a process that traces nothing; `otlp` has those that go to a
collector, and `tracing` chooses. What they mean is in docs/tracing.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Metadata = Sequence[tuple[str, str]]
"""Of a call: `traceparent` and `tracestate` of W3C Trace Context, or nothing."""

Value = str | bool | int | float
Attributes = Mapping[str, Value]

NO_ATTRIBUTES: Attributes = {}


class Span:
    """What one process does for one request. This one is of a process that traces nothing: it passes on what came and does no more.

    metadata: for the calls that are part of it. trace_id: 32 hex digits; empty where nothing is recorded. Seconds are those of
    time.monotonic().
    """

    trace_id = ""

    def __init__(self, metadata: Metadata) -> None:
        self.metadata = metadata

    def event(self, name: str, attributes: Attributes = NO_ATTRIBUTES, *, at_s: float | None = None) -> None:
        """Something that happened. at_s: when; None: now."""

    def phase(self, name: str, begun_s: float, ended_s: float, attributes: Attributes = NO_ATTRIBUTES, *, reason: str = "OK") -> None:
        """A part of it that is over: a span of its own below this one. reason: how it ended, as in `end`."""

    def end(self, reason: str, attributes: Attributes = NO_ATTRIBUTES) -> None:
        """It is over. reason: OK, CANCELLED, INTERNAL or a name in ErrorReason; any but the first two is an error."""


class Tracer:
    """Begins spans. This one begins those that are nothing."""

    def begin(self, name: str, parent: Metadata, attributes: Attributes = NO_ATTRIBUTES) -> Span:
        """parent: metadata of the call that the span answers; without a trace context in it, the span begins a trace."""
        return Span(parent)
