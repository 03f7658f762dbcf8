"""Prometheus metrics of the router, explained in docs/metrics.md. Their labels name the pipeline, for metrics about stages also the stage
and the model, but never a request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial

from prometheus_client import Counter, Gauge, Histogram

from omnistage.host.registry import new_registry
from omnistage.router.placement import STATES
from omnistage.v1 import omni_pb2

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
        self.ended = Counter("omnistage_router_requests_total", "Requests by how they ended.", ("pipeline", "reason"), registry=registry)
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
        self.ended.labels(pipeline=pipeline, reason="OK")
        for histogram in (self.duration, self.queue, self.first_text, self.first_audio, self.real_time_factor):
            histogram.labels(pipeline=pipeline)
        for stage in stages:
            self.failovers.labels(pipeline=pipeline, stage=stage)

    def watch(self, pipeline: str, models: Mapping[str, str], count: Callable[[str, omni_pb2.ReplicaState], int]) -> None:
        """Show how many replicas of a pipeline are in each state. models: names of the models, by kind of stage; a name is empty until it
        is known. count: returns how many replicas of a kind are in a state."""
        for kind, model in models.items():
            for state, label in STATES.items():
                if model:
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
