"""Prometheus metrics of the gateway, explained in docs/metrics.md. Labels: endpoint and status; never the client."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from omnistage.host.registry import new_registry

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10, 30, 60, 300)


class GatewayMetrics:
    """The metric families of the gateway, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = new_registry()
        self.inflight = Gauge("omnistage_gateway_inflight", "HTTP requests that run now.", registry=registry)
        self.connections = Gauge("omnistage_gateway_connections", "Connections that are open.", registry=registry)
        self.ended = Counter(
            "omnistage_gateway_requests_total", "HTTP requests by how they ended.", ("endpoint", "status", "reason"), registry=registry
        )
        self.duration = Histogram(
            "omnistage_gateway_request_seconds",
            "From request to the end of its answer.",
            ("endpoint",),
            registry=registry,
            buckets=_SECONDS,
        )
        self.first_byte = Histogram(
            "omnistage_gateway_first_byte_seconds",
            "From request to the first byte of its answer.",
            ("endpoint",),
            registry=registry,
            buckets=_SECONDS,
        )
        self.films = Gauge("omnistage_gateway_films", "Films that wait, and those that are made.", ("status",), registry=registry)
        self.film_bytes = Gauge("omnistage_gateway_film_bytes", "Bytes of all films that are kept.", registry=registry)
        self.films_ended = Counter("omnistage_gateway_films_ended_total", "Films by how they ended.", ("status", "code"), registry=registry)
        self.films_ended.labels("completed", "OK")
