"""All that the router says about its requests. A `Tally` has the figures of one answer so far, for its usage and for the rest. At the end
of a request its `Account` writes one line to the log (docs/logs.md) and ends one span (docs/tracing.md). `RouterMetrics` are for Prometheus
(docs/metrics.md): their labels name the pipeline, for metrics about stages also the stage and the model, but never a request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import structlog
from prometheus_client import Counter, Gauge, Histogram

from omnistage.host.metrics import new_registry
from omnistage.host.spans import Attributes, Span, Value
from omnistage.router.admission import Place
from omnistage.router.replica import STATES
from omnistage.v1 import chunk_pb2, omni_pb2, stage_pb2
from omnistage.wire.errors import StageError
from omnistage.wire.proto_values import KINDS, kind_name

log = structlog.get_logger("omnistage.router.account")


@dataclass(frozen=True, slots=True)
class Loss:
    """A replica that was lost and replaced. lost_address: its address. replica: address of its replacement. at_s: moment when this router
    heard of it, in time.monotonic() seconds. pause_s: seconds from the loss to the replacement."""

    stage: str
    lost_address: str
    replica: str
    reason: str
    pause_s: float
    at_s: float

    @property
    def attributes(self) -> Attributes:
        """Attributes for the event of a trace."""
        values: Attributes = {"stage": self.stage, "lost": self.lost_address, "replica": self.replica, "why": self.reason}
        return {f"omnistage.{name}": value for name, value in values.items()} | {"omnistage.pause_s": self.pause_s}


class Tally:
    """Counts of one answer. Seconds are counted from the creation of this object; `begun_s` and `opened_s` are time.monotonic() seconds."""

    def __init__(self) -> None:
        self.begun_s = time.monotonic()
        self.opened_s: float | None = None
        """When all stages had taken the session; None: not yet."""
        self.first: dict[str, float] = {}
        """Seconds to the first item that the client gets, by kind of item: thought, text, audio and others."""
        self.tokens = 0
        """Tokens of text that were made, wanted or not."""
        self.thought_tokens = 0
        """How many of `tokens` are thoughts before the answer."""
        self.prompt_tokens: int | None = None
        """Tokens of the prompt; None: no stage has reported them yet. A stage reports them when it is done."""
        self.cached_tokens: int | None = None
        """How many of `prompt_tokens` were found already computed; None: no stage has reported it yet."""
        self.unspoken = 0
        """Characters of the text that the voice has no sound for, as reported by the stages that are done."""
        self.sound_s = 0.0
        """Seconds of sound that the client got."""
        self.last_sound_s = 0.0
        """Seconds to the last item of sound."""
        self.pictures = 0
        """Whole pictures that the client got, each layer counted; no previews."""
        self.frames = 0
        """Frames of film that the client got."""
        self.finish_reason = chunk_pb2.FINISH_REASON_UNSPECIFIED
        self.losses: list[Loss] = []
        self.replicas: dict[str, list[str]] = {}
        """Addresses of the replicas that have taken part, by stage, each at its first use."""
        self._first_stage = ""
        self.reports: dict[stage_pb2.StageKind, stage_pb2.Report] = {}

    def opened(self, stage: str, address: str) -> None:
        """Note that all stages have taken the session. stage, address: the kind and the address of the first one."""
        self.opened_s = time.monotonic()
        self._first_stage = stage
        self._used(stage, address)

    def count_made(self, chunks: Sequence[chunk_pb2.Chunk]) -> None:
        """Count chunks that came from the stages, wanted or not."""
        for chunk in chunks:
            if chunk.HasField("text"):
                self.tokens += chunk.count
                self.thought_tokens += chunk.count if chunk.text.HasField("thought") else 0
                self.finish_reason = chunk.text.finish_reason or self.finish_reason

    def count_given(self, chunks: Sequence[chunk_pb2.Chunk]) -> None:
        """Count chunks that the client gets."""
        for chunk in chunks:
            content = chunk.WhichOneof("payload") or ""
            if content == "text" and chunk.text.HasField("thought"):
                content = "thought"
            if chunk.count:
                self.first.setdefault(content, time.monotonic() - self.begun_s)
            match content:
                case "audio" if chunk.audio.sample_rate_hz:
                    self.sound_s += chunk.count / chunk.audio.sample_rate_hz
                    self.last_sound_s = time.monotonic() - self.begun_s
                case "image":  # The count of a preview is 0.
                    self.pictures += chunk.count
                case "video":
                    self.frames += chunk.count

    def replaced(self, failover: stage_pb2.Failover) -> Loss:
        """Note that a replica was lost and another one goes on."""
        stage = kind_name(failover.kind) if failover.kind in KINDS.values() else "unknown"
        pause_s = failover.pause.ToTimedelta().total_seconds()
        loss = Loss(stage, failover.lost, failover.replica, failover.reason, pause_s, time.monotonic())
        self.losses.append(loss)
        self._used(stage, failover.lost)
        self._used(stage, failover.replica)
        return loss

    def reported(self, report: stage_pb2.Report) -> None:
        """Note that a stage is done. The address in its report is noted as a replica that has taken part, except for the first stage, for
        which `opened` has noted the address that was called."""
        self.reports[report.kind] = report
        if report.HasField("prompt_tokens"):
            self.prompt_tokens, self.cached_tokens = report.prompt_tokens, report.cached_tokens
        self.unspoken = sum(each.unspoken for each in self.reports.values())
        if report.kind in KINDS.values() and kind_name(report.kind) != self._first_stage:
            self._used(kind_name(report.kind), report.replica)

    def _used(self, stage: str, address: str) -> None:
        """Note that the replica at this address takes part, unless it is noted already."""
        addresses = self.replicas.setdefault(stage, [])
        if address not in addresses:
            addresses.append(address)


BUG = {"reason": "INTERNAL"}

_FINISH = {number: name.removeprefix("FINISH_REASON_").lower() for name, number in chunk_pb2.FinishReason.items() if number}

_STANDARD = {"tokens": "gen_ai.usage.output_tokens", "prompt_tokens": "gen_ai.usage.input_tokens"}
"""Figures for which OpenTelemetry's conventions have a name; every other attribute of a span is `omnistage.*`."""


class Account:
    """The account of one request from its arrival on. Call `asks`, `waits`, `placed` and `answers` as the request gets that far, then
    `finish` or `failed`, and `close` in any case.

    client: the text of `admission.client_text`. Neither the line nor the span holds anything of the question or the answer.
    """

    def __init__(self, client: str, span: Span) -> None:
        self._client = client
        self._begun_s = time.monotonic()
        self._waits_since: float | None = None
        self._place: Place | None = None
        self._request_id = self._pipeline = self._session_id = ""
        self._error = {"reason": "CANCELLED"}
        self.span = span
        self.tally = Tally()

    def asks(self, pipeline: str, request_id: str) -> None:
        """Note that the request asks for this pipeline. pipeline, request_id: empty if the check of the request did not get so far."""
        self._pipeline, self._request_id = pipeline, request_id

    def waits(self) -> None:
        """Note that the request asks for a place now."""
        self._waits_since = time.monotonic()

    def placed(self, place: Place) -> None:
        """Note that the request has a place: it is an answer from now on."""
        self._place = place
        self.tally = Tally()

    def answers(self, session_id: str) -> None:
        """Note that the stages are asked next, in a session with this id."""
        self._session_id = session_id

    def finish(self) -> None:
        """Note that the whole answer was sent."""
        self._error = {"reason": "OK"}

    def failed(self, error: StageError | None) -> None:
        """Note that the request ended with this error; None: a bug of the router ended it. The account keeps only the texts of the error,
        because the error itself would keep its frames in memory."""
        self._error = BUG if error is None else error.for_log()

    @property
    def reason(self) -> str:
        """How the request ended, as noted so far: OK, INTERNAL, a name in ErrorReason, or CANCELLED if nobody waits for the answer any
        more."""
        return self._error["reason"]

    def close(self) -> None:
        """Write the line and end the span."""
        figures = {} if self._place is None else self._figures(self._place)
        request = {"request_id": self._request_id or None, "pipeline": self._pipeline or None, "client": self._client}
        line = {**request, **self._error, **figures, "total_s": _round_s(time.monotonic() - self._begun_s)}
        log.info("request.refused" if self._place is None else "answer.done", **line)
        self._trace({name: value for name, value in line.items() if name not in ("reason", "total_s")})

    def _figures(self, place: Place) -> dict[str, object]:
        """Figures of an answer that had a place, as fields of its log line."""
        tally = self.tally
        return {
            "session_id": self._session_id or None,
            "finish_reason": _FINISH.get(tally.finish_reason),
            "tokens": tally.tokens,
            "thought_tokens": tally.thought_tokens,
            "prompt_tokens": tally.prompt_tokens,
            "cached_tokens": tally.cached_tokens,
            "queued_s": _round_s(place.queued_s),
            "ttft_s": self._to_first("text"),
            "ttfa_s": self._to_first("audio"),
            "audio_s": _round_s(tally.sound_s),
            "unspoken": tally.unspoken,
            "pictures": tally.pictures,
            "frames": tally.frames,
            "failovers": len(tally.losses),
            "replicas": tally.replicas,
        }

    def _to_first(self, content: str) -> float | None:
        """Seconds from the request's arrival to the first item of this kind; None: there was no such item."""
        if content not in self.tally.first:
            return None
        # The tally counts from the moment of the place, and the account from the arrival.
        return _round_s(self.tally.begun_s + self.tally.first[content] - self._begun_s)

    def _trace(self, line: dict[str, object]) -> None:
        """End the span with its phases and with the fields of the line, except its reason and its length."""
        span, tally, now_s = self.span, self.tally, time.monotonic()
        if not span.trace_id:
            return
        if self._waits_since is not None and self._place is None:  # It ended while it waited.
            span.phase("queue", self._waits_since, now_s, reason=self.reason)
        elif self._waits_since is not None and self._place is not None and self._place.queued_s:
            span.phase("queue", self._waits_since, tally.begun_s, reason="OK")  # The tally began with the place.
        if self._session_id:
            span.phase("open", tally.begun_s, tally.opened_s or now_s, reason="OK" if tally.opened_s else self.reason)
        for content, first_s in tally.first.items():
            span.event(f"first_{content}", at_s=tally.begun_s + first_s)
        for loss in tally.losses:
            span.event("failover", loss.attributes, at_s=loss.at_s)
        span.end(self.reason, {_STANDARD.get(name, f"omnistage.{name}"): value for name, value in line.items() if isinstance(value, Value)})


def _round_s(seconds: float) -> float:
    return round(seconds, 4)


_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10, 30, 60, 300)
_FACTORS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2, 3, 5, 10)


class RouterMetrics:
    """The metrics of the router, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = new_registry()
        by_pipeline = ("pipeline",)
        self.inflight = Gauge("omnistage_router_inflight", "Answers that run now.", registry=registry)
        self.waiting = Gauge("omnistage_router_waiting", "Requests that wait for a place.", registry=registry)
        self.places = Gauge("omnistage_router_places", "Answers that may run at once.", registry=registry)
        self.requests = Counter("omnistage_router_requests_total", "Requests by how they ended.", ("pipeline", "reason"), registry=registry)
        self.duration = Histogram(
            "omnistage_router_request_seconds", "From request to status.", by_pipeline, registry=registry, buckets=_SECONDS
        )
        self.queue = Histogram(
            "omnistage_router_queue_seconds",
            "Waited for a place, of requests that got one.",
            by_pipeline,
            registry=registry,
            buckets=_SECONDS,
        )
        self.first_text = Histogram(
            "omnistage_router_ttft_seconds", "From request to first text.", by_pipeline, registry=registry, buckets=_SECONDS
        )
        self.first_audio = Histogram(
            "omnistage_router_ttfa_seconds", "From request to first sound.", by_pipeline, registry=registry, buckets=_SECONDS
        )
        self.real_time_factor = Histogram(
            "omnistage_router_rtf",
            "Real-time factor of whole answers: from request to last sound, over the seconds of sound.",
            by_pipeline,
            registry=registry,
            buckets=_FACTORS,
        )
        self.failovers = Counter(
            "omnistage_router_failovers_total",
            "Replicas that were lost in an answer that went on with another one.",
            ("pipeline", "stage"),
            registry=registry,
        )
        self.replicas = Gauge(
            "omnistage_router_replicas",
            "Replicas by state: serving, draining, lost or starting.",
            ("pipeline", "stage", "model", "state"),
            registry=registry,
        )

    def begin(self, pipeline: str, stages: Iterable[str]) -> None:
        """Show the metrics of a pipeline at 0 from now on: a rate needs the value before the first answer."""
        self.requests.labels(pipeline=pipeline, reason="OK")
        for histogram in (self.duration, self.queue, self.first_text, self.first_audio, self.real_time_factor):
            histogram.labels(pipeline=pipeline)
        for stage in stages:
            self.failovers.labels(pipeline=pipeline, stage=stage)

    def watch(self, pipeline: str, models: Mapping[str, str], count: Callable[[str, omni_pb2.ReplicaState], int]) -> None:
        """Show how many replicas of a pipeline are in each state. models: names of the models, by kind of stage; a name is empty until it
        is known. count: returns how many replicas of a kind are in a state."""
        for kind, model in models.items():
            for state, label in STATES.items():
                if model:  # Then the series without a model ends, which has been shown until now.
                    with suppress(KeyError):
                        self.replicas.remove(pipeline, kind, "", label)
                self.replicas.labels(pipeline=pipeline, stage=kind, model=model, state=label).set_function(partial(count, kind, state))

    def count_answer(self, pipeline: str, queued_s: float, first: Mapping[str, float], failovers: Iterable[str]) -> None:
        """Count an answer that had a place, however it ended. first: seconds from getting the place to the first item, by kind of item.
        failovers: kinds of stages, once for each lost replica."""
        self.queue.labels(pipeline=pipeline).observe(queued_s)
        for content, histogram in (("text", self.first_text), ("audio", self.first_audio)):
            if content in first:
                histogram.labels(pipeline=pipeline).observe(queued_s + first[content])
        for stage in failovers:
            self.failovers.labels(pipeline=pipeline, stage=stage).inc()
