"""The trace of one session (docs/tracing.md): when its phases began and ended, what it sent on, and which replicas were lost."""

from __future__ import annotations

import time
from collections import Counter
from typing import Protocol

from omnistage.host.spans import Span, Value
from omnistage.stage.meter import Meter
from omnistage.stage.opening import CheckedOpen
from omnistage.v1 import stage_pb2
from omnistage.wire.kinds import kind_name


class Traced(Protocol):
    """A session, as far as its trace needs to know it."""

    opening: CheckedOpen
    meter: Meter

    def report(self) -> stage_pb2.Report: ...


class SessionTrace:
    """The trace of one `Run`, from its first byte on; call `end` in any case. All times are time.monotonic() seconds."""

    def __init__(self, span: Span) -> None:
        self.span = span
        self._begun_s = time.monotonic()
        self._first_input_s = 0.0
        self._transfer = (0.0, 0.0)
        """When the first piece was offered to the next hop, and when the next hop had accepted the last piece."""
        self._waited_s = 0.0  # seconds that the logic waited for the next hop
        self._pieces = 0  # pieces that went to the next hop
        self._sent_tensors: Counter[str] = Counter()
        self._sent_bytes: Counter[str] = Counter()

    def came(self) -> None:
        """Note when input came from the caller."""
        self._first_input_s = self._first_input_s or time.monotonic()

    def posted(self, transport: str, size: int) -> None:
        """Note that a tensor of `size` bytes went to the next hop. A tensor that is sent a second time after a loss counts twice.
        transport: its name, as in Sender."""
        self._sent_tensors[transport] += 1
        self._sent_bytes[transport] += size

    def sent(self, begun_s: float) -> None:
        """Note that the link to the next hop has accepted a piece, which was offered at `begun_s`."""
        now_s = time.monotonic()
        self._transfer = (self._transfer[0] or begun_s, now_s)
        self._waited_s += now_s - begun_s
        self._pieces += 1

    def lost(self, failover: stage_pb2.Failover) -> None:
        """Note that the next hop was lost and another replica goes on."""
        attributes: dict[str, Value] = {"stage": kind_name(failover.kind), "lost": failover.lost, "replica": failover.replica}
        attributes |= {"why": failover.reason, "pause_s": failover.pause.ToTimedelta().total_seconds()}
        self.span.event("failover", {f"omnistage.{name}": value for name, value in attributes.items()})

    def end(self, reason: str, session: Traced | None) -> None:
        """Note that the session is over. session: None: there was no session, because the request was refused."""
        if not self.span.trace_id:
            return
        if session is None:
            self.span.end(reason)
            return
        self._phases(session.meter, reason)
        self.span.end(reason, _attributes(session))

    def _phases(self, meter: Meter, reason: str) -> None:
        """Add the phases one after the other, as far as the session came. The phase in which it ended gets the reason."""
        now_s = time.monotonic()
        opened, first, last = meter.times
        if not opened:
            self.span.phase("open", self._begun_s, now_s, reason=reason)
            return
        self.span.phase("open", self._begun_s, opened)
        admitted = opened + meter.timing.queued_s
        if admitted > opened:
            self.span.phase("queue", opened, admitted)
        prefill = max(admitted, self._first_input_s)
        if not first:
            self.span.phase("prefill", prefill, now_s, reason=reason)
            return
        self.span.phase("prefill", min(prefill, first), first)
        self.span.event("first_output", at_s=first)
        self.span.phase("generate", first, last if reason == "OK" else now_s, reason=reason)
        begin_s, end_s = self._transfer
        if begin_s:
            self.span.phase("transfer", begin_s, end_s, self._transferred())

    def _transferred(self) -> dict[str, Value]:
        """Attributes of the phase `transfer`: what went to the next hop, and how long the link made the logic wait."""
        tensors = {f"omnistage.tensors.{way}": count for way, count in self._sent_tensors.items()}
        sizes = {f"omnistage.bytes.{way}": size for way, size in self._sent_bytes.items()}
        return {"omnistage.pieces": self._pieces, "omnistage.waited_s": round(self._waited_s, 6), **tensors, **sizes}


def _attributes(session: Traced) -> dict[str, Value]:
    """Attributes of the span of a session."""
    request, report = session.opening.request, session.report()
    values: dict[str, Value] = {
        "session_id": request.session_id,
        "stage": kind_name(report.kind),
        "model": request.model,
        "replica": report.replica,
        "attempt": ".".join(map(str, request.attempts)),
        "resumed": session.opening.resumption.again,
        "failovers": report.failovers,
        "cached_tokens": report.cached_tokens,
        "audio_underruns": report.audio_underruns,
        "unspoken": report.unspoken,
    }
    if report.HasField("prompt_tokens"):
        values["prompt_tokens"] = report.prompt_tokens
    values |= {f"input.{port}": items for port, items in report.input_items.items()}
    values |= {f"output.{port}": items for port, items in report.output_items.items()}
    return {f"omnistage.{name}": value for name, value in values.items()}
