"""Prometheus metrics of the router. Labels: pipeline, and where a metric joins those of stages to it, stage and model; never a request."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10, 30, 60, 300)


class RouterMetrics:
    """The families of the router, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.inflight = Gauge("omnistage_router_inflight", "Answers that run now.", registry=registry)
        self.waiting = Gauge("omnistage_router_waiting", "Requests that wait for a place.", registry=registry)
        self.places = Gauge("omnistage_router_places", "Answers that may run at once.", registry=registry)
        self.ended = Counter("omnistage_router_requests_total", "Requests by how they ended.", ("pipeline", "reason"), registry=registry)
        self.duration = Histogram(
            "omnistage_router_request_seconds", "From request to status.", ("pipeline",), registry=registry, buckets=_SECONDS
        )
        self.replicas = Gauge(
            "omnistage_router_replicas", "Replicas that take sessions.", ("pipeline", "stage", "model"), registry=registry
        )
        self.first_text = Histogram(
            "omnistage_ttft_seconds", "From request to first text.", ("pipeline",), registry=registry, buckets=_SECONDS
        )
        self.first_audio = Histogram(
            "omnistage_first_audio_seconds", "From request to first sound.", ("pipeline",), registry=registry, buckets=_SECONDS
        )
