"""Prometheus metrics of a stage server, explained in docs/metrics.md. Labels are stage and model; never a request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import Counter, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from omnistage.connector.arena import Arena
from omnistage.host.registry import new_registry
from omnistage.models.interface import Load
from omnistage.stage.logic import SessionTiming
from omnistage.v1 import stage_pb2

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
        self._ended = Counter("omnistage_stage_sessions_total", "Sessions by how they ended.", (*names, "reason"), registry=registry)
        self._ended.labels(**self._labels, reason="OK")  # A rate needs the 0 before the first session.
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
        self.registry.register(_Now(self._labels, load, sessions, lambda: description.max_sessions, arena))
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
                each = 1000 / port.rate_millihertz if port.payload == sound else 1.0
                self._counts[port.name] = counters[port.payload], each

    def _counter(self, name: str, meaning: str) -> Counter:
        return Counter(name, meaning, tuple(self._labels), registry=self.registry).labels(**self._labels)

    def _by_transport(self, name: str, meaning: str) -> Counter:
        """A counter with a further label, `transport`, that shows 0 for each transport from now on."""
        counter = Counter(name, meaning, (*self._labels, "transport"), registry=self.registry)
        for transport in TRANSPORTS:
            counter.labels(**self._labels, transport=transport)
        return counter

    def sent(self, transport: str, size: int) -> None:
        """Count a tensor that went to the next stage. transport: inline or shared_memory. size: in bytes."""
        if self._tensors is not None and self._tensor_bytes is not None:
            self._tensors.labels(**self._labels, transport=transport).inc()
            self._tensor_bytes.labels(**self._labels, transport=transport).inc(size)

    def made(self, port: str, items: int) -> None:
        """Count items that the model made, in the unit of the metric of their port: tokens, seconds or pictures."""
        if port in self._counts:
            counter, each = self._counts[port]
            counter.inc(items * each)

    def ended(self, reason: str) -> None:
        """Count a session. reason: OK, CANCELLED, INTERNAL or a name in ErrorReason."""
        self._ended.labels(**self._labels, reason=reason).inc()

    def heard(self, timing: SessionTiming) -> None:
        """Count, once at the end of a session, how often and how long its listener had nothing to play, and the characters not spoken."""
        if self._unspoken is not None:
            self._unspoken.inc(timing.unspoken)
        if self._underruns is not None and self._starved is not None:
            self._underruns.inc(timing.audio_underruns)
            self._starved.inc(timing.audio_starved_s)


class _Now(Collector):
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
