"""All that a stage says about its sessions. A `Meter` has times and counts of one session, for its report. A `SessionTrace`
(docs/tracing.md) says when the phases of a session began and ended, what it sent on, and which replicas were lost. `StageMetrics` are for
Prometheus (docs/metrics.md): their labels are stage and model, never a request."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client import Counter, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from omnistage.connector.arena import Arena
from omnistage.host.metrics import new_registry
from omnistage.host.spans import Span, Value
from omnistage.models.interface import Load
from omnistage.stage.logic import SessionTiming
from omnistage.stage.opening import CheckedOpen
from omnistage.v1 import stage_pb2
from omnistage.wire.chunks import Output
from omnistage.wire.proto_values import duration, kind_name


class Meter:
    """Measures one session from `opened` on. timing: figures from the logic."""

    def __init__(self, ports: Iterable[str], on_made: Callable[[str, int], None]) -> None:
        """ports: output ports of the stage. on_made: see SessionEnvironment."""
        self._opened_at = 0.0
        self._first_output_at = 0.0
        self._last_output_at = 0.0
        self._items = dict.fromkeys(ports, 0)
        self._on_made = on_made
        self.timing = SessionTiming()

    def opened(self) -> None:
        """Note that the session begins: Opened is about to be sent."""
        self._opened_at = self._last_output_at = time.monotonic()

    def count_output(self, output: Output) -> None:
        """Note that the logic made a piece of output."""
        self._last_output_at = time.monotonic()
        if not self._first_output_at:
            self._first_output_at = self._last_output_at
        self._items[output.port] += output.count
        self._on_made(output.port, output.count)

    @property
    def times(self) -> tuple[float, float, float]:
        """The times of Opened, of the first output and of the last one, in time.monotonic() seconds; 0 for a moment that has not come.
        Before the first output the third value is the time of Opened."""
        return self._opened_at, self._first_output_at, self._last_output_at

    @property
    def first_output_s(self) -> float | None:
        """Seconds from Opened to the first output; None if there was none."""
        return self._first_output_at - self._opened_at if self._first_output_at else None

    def report(self, kind: stage_pb2.StageKind, replica: str, input_items: Mapping[str, int], failovers: int) -> stage_pb2.Report:
        """The report of the session as of now. replica: address of this replica. failovers: how often the next hop was replaced."""
        report = stage_pb2.Report(
            kind=kind,
            replica=replica,
            queued=duration(self.timing.queued_s),
            first_output=duration(self._first_output_at - self._opened_at),  # 0 without an output, as it is never negative.
            total=duration(self._last_output_at - self._opened_at),
            input_items=input_items,
            output_items=self._items,
            cached_tokens=self.timing.cached_tokens,
            prompt_tokens=self.timing.prompt_tokens,
            audio_underruns=self.timing.audio_underruns,
            audio_starved=duration(self.timing.audio_starved_s),
            failovers=failovers,
            unspoken=self.timing.unspoken,
            unspoken_words=" ".join(self.timing.unspoken_runs),
            notes=self.timing.notes,
        )
        if self.timing.drew is not None:
            report.drew = self.timing.drew
        return report


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
        self._sent_tensors: collections.Counter[str] = collections.Counter()
        self._sent_bytes: collections.Counter[str] = collections.Counter()

    def note_input(self) -> None:
        """Note when input came from the caller."""
        self._first_input_s = self._first_input_s or time.monotonic()

    def posted(self, transport: str, size: int) -> None:
        """Note that a tensor of `size` bytes went to the next hop. A tensor that is sent a second time after a loss counts twice.
        transport: its name, as in Sender."""
        self._sent_tensors[transport] += 1
        self._sent_bytes[transport] += size

    def note_piece(self, offered_s: float) -> None:
        """Note that the link to the next hop has accepted a piece, which was offered at `offered_s`."""
        now_s = time.monotonic()
        self._transfer = (self._transfer[0] or offered_s, now_s)
        self._waited_s += now_s - offered_s
        self._pieces += 1

    def note_failover(self, failover: stage_pb2.Failover) -> None:
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
        opened_s, first_output_s, last_output_s = meter.times
        if not opened_s:
            self.span.phase("open", self._begun_s, now_s, reason=reason)
            return
        self.span.phase("open", self._begun_s, opened_s)
        admitted_s = opened_s + meter.timing.queued_s
        if admitted_s > opened_s:
            self.span.phase("queue", opened_s, admitted_s)
        prefill_s = max(admitted_s, self._first_input_s)
        if not first_output_s:
            self.span.phase("prefill", prefill_s, now_s, reason=reason)
            return
        self.span.phase("prefill", min(prefill_s, first_output_s), first_output_s)  # The first input may come after the first output.
        self.span.event("first_output", at_s=first_output_s)
        self.span.phase("generate", first_output_s, last_output_s if reason == "OK" else now_s, reason=reason)
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
        "resumed": session.opening.resumption.is_resumed,
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


_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 5, 10, 30, 60, 300)

TRANSPORTS = ("inline", "shared_memory")
"""How tensors go to the next stage."""


class StageMetrics:
    """The metrics of one stage server, in a registry of their own."""

    def __init__(self, stage: str, model: str) -> None:
        self.registry = registry = new_registry()
        self._labels = {"stage": stage, "model": model}
        names = tuple(self._labels)
        self.first_output = Histogram(
            "omnistage_stage_first_output_seconds", "From Opened to the first output.", names, registry=registry, buckets=_SECONDS
        ).labels(**self._labels)
        self.duration = Histogram(
            "omnistage_stage_session_seconds", "From Open to the end of a session.", names, registry=registry, buckets=_SECONDS
        ).labels(**self._labels)
        self._sessions = Counter("omnistage_stage_sessions_total", "Sessions by how they ended.", (*names, "reason"), registry=registry)
        self._sessions.labels(**self._labels, reason="OK")  # A rate needs the 0 before the first session.
        self._counts: dict[str, tuple[Counter, float]] = {}
        """The counter that an item of a port adds to, and how much the item adds."""
        self._tensors: Counter | None = None
        self._tensor_bytes: Counter | None = None
        self._underruns: Counter | None = None
        self._starved: Counter | None = None
        self._unspoken: Counter | None = None

    def watch(
        self, description: stage_pb2.DescribeResponse, load: Callable[[], Load], sessions: Callable[[], int], arena: Arena | None
    ) -> None:
        """Show from now on how busy the stage is, and count what it makes. load, sessions: called at each scrape, from any thread. arena:
        None: tensors do not go through shared memory."""
        self.registry.register(_LoadCollector(self._labels, load, sessions, lambda: description.max_sessions, arena))
        tokens, sound, pictures = stage_pb2.PAYLOAD_TEXT, stage_pb2.PAYLOAD_AUDIO, stage_pb2.PAYLOAD_IMAGE
        payloads = {port.payload for port in description.produces}
        counters: dict[stage_pb2.Payload, Counter] = {}
        if tokens in payloads:
            counters[tokens] = self._counter("omnistage_stage_tokens_total", "Tokens of text made.")
        if sound in payloads:
            counters[sound] = self._counter("omnistage_stage_sound_seconds_total", "Seconds of sound made.")
            self._underruns = self._counter("omnistage_stage_sound_underruns_total", "Times a listener had nothing left to play.")
            self._starved = self._counter("omnistage_stage_sound_starved_seconds_total", "How long listeners had nothing left to play.")
        if description.kind == stage_pb2.STAGE_KIND_TALKER:
            self._unspoken = self._counter("omnistage_stage_unspoken_characters_total", "Characters that the voice has no sound for.")
        if pictures in payloads:
            counters[pictures] = self._counter("omnistage_stage_pictures_total", "Pictures made.")
        if stage_pb2.PAYLOAD_TENSOR in payloads:
            self._tensors = self._by_transport("omnistage_connector_sent_tensors_total", "Tensors given to the next stage.")
            self._tensor_bytes = self._by_transport("omnistage_connector_sent_bytes_total", "Bytes of tensors given to the next stage.")
        for port in description.produces:
            if port.payload in counters:
                amount = 1000 / port.rate_millihertz if port.payload == sound else 1.0  # Seconds for each sample of sound.
                self._counts[port.name] = counters[port.payload], amount

    def _counter(self, name: str, meaning: str) -> Counter:
        return Counter(name, meaning, tuple(self._labels), registry=self.registry).labels(**self._labels)

    def _by_transport(self, name: str, meaning: str) -> Counter:
        """A counter with a further label, `transport`, that shows 0 for each transport from now on."""
        counter = Counter(name, meaning, (*self._labels, "transport"), registry=self.registry)
        for transport in TRANSPORTS:
            counter.labels(**self._labels, transport=transport)
        return counter

    def count_tensor(self, transport: str, size: int) -> None:
        """Count a tensor that went to the next stage. transport: inline or shared_memory. size: in bytes."""
        if self._tensors is not None and self._tensor_bytes is not None:
            self._tensors.labels(**self._labels, transport=transport).inc()
            self._tensor_bytes.labels(**self._labels, transport=transport).inc(size)

    def count_items(self, port: str, items: int) -> None:
        """Count items that the model made, in the unit of the metric of their port: tokens, seconds or pictures."""
        if port in self._counts:
            counter, amount = self._counts[port]
            counter.inc(items * amount)

    def count_session(self, reason: str) -> None:
        """Count a session. reason: OK, CANCELLED, INTERNAL or a name in ErrorReason."""
        self._sessions.labels(**self._labels, reason=reason).inc()

    def add_timing(self, timing: SessionTiming) -> None:
        """Count, once at the end of a session, how often and how long its listener had nothing to play, and the characters not spoken."""
        if self._unspoken is not None:
            self._unspoken.inc(timing.unspoken)
        if self._underruns is not None and self._starved is not None:
            self._underruns.inc(timing.audio_underruns)
            self._starved.inc(timing.audio_starved_s)


class _LoadCollector(Collector):
    """Figures that are read at each scrape: of the sessions, and of queue, cache, arena and batches if the stage has them."""

    def __init__(
        self, labels: dict[str, str], load: Callable[[], Load], sessions: Callable[[], int], places: Callable[[], int], arena: Arena | None
    ) -> None:
        """load, sessions, places: called at each scrape; `places` returns how many sessions may run at once."""
        self._labels = labels
        self._load, self._sessions, self._places, self._arena = load, sessions, places, arena

    def collect(self) -> Iterator[Metric]:
        load = self._load()
        shown = [
            ("omnistage_stage_inflight", "Sessions that run now.", self._sessions()),
            ("omnistage_stage_places", "Sessions that may run at once.", self._places()),
            ("omnistage_stage_queue_depth", "Sessions that wait for their first step.", load.queued),
        ]
        if load.kv_pages_total:
            shown += [
                ("omnistage_stage_kv_pages_used", "KV-cache pages in use.", load.kv_pages_used),
                ("omnistage_stage_kv_pages", "KV-cache pages that there are.", load.kv_pages_total),
            ]
        if (arena := self._arena) is not None:
            shown += [
                ("omnistage_connector_arena_used_bytes", "Shared memory in use.", arena.bytes_used),
                ("omnistage_connector_arena_bytes", "Shared memory that may be used.", arena.max_bytes),
                ("omnistage_connector_leases", "Blocks that consumers lease.", arena.leases),
            ]
        yield from self._gauges(shown)
        if load.kv_pages_total:
            meaning = "Times a session lost its pages to others, and was computed anew."
            preemptions = CounterMetricFamily("omnistage_stage_preemptions_total", meaning, labels=list(self._labels))
            preemptions.add_metric(list(self._labels.values()), load.preemptions)
            yield preemptions
        if load.batches is not None:
            size = SummaryMetricFamily(
                "omnistage_stage_batch_size", "Sessions in a step of the model, over all steps.", labels=list(self._labels)
            )
            size.add_metric(list(self._labels.values()), load.batches.steps, load.batches.stepped)
            yield size

    def _gauges(self, shown: Sequence[tuple[str, str, int]]) -> Iterable[Metric]:
        for name, meaning, value in shown:
            gauge = GaugeMetricFamily(name, meaning, labels=list(self._labels))
            gauge.add_metric(list(self._labels.values()), value)
            yield gauge
