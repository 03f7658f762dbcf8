"""Prometheus metrics of a stage server. Labels are stage and model; never a request."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 5, 10, 30, 60, 300)


class StageMetrics:
    """The families of one stage server, in a registry of their own."""

    def __init__(self, stage: str, model: str) -> None:
        self.registry = CollectorRegistry()
        labels = {"stage": stage, "model": model}
        names = tuple(labels)
        registry = self.registry
        self.sessions = Gauge("omnistage_stage_inflight", "Sessions that run now.", names, registry=registry).labels(**labels)
        self.queued = Gauge("omnistage_stage_queue_depth", "Sessions that wait for their first step.", names, registry=registry).labels(
            **labels
        )
        self.kv_pages = Gauge("omnistage_kv_pages_used", "KV-cache pages in use.", names, registry=registry).labels(**labels)
        self.arena_bytes = Gauge("omnistage_connector_arena_used_bytes", "Shared memory in use.", names, registry=registry).labels(**labels)
        self.leases = Gauge("omnistage_connector_leases", "Blocks that consumers lease.", names, registry=registry).labels(**labels)
        self._tensors = Counter(
            "omnistage_connector_sent_tensors_total", "Tensors given to the next stage.", (*names, "transport"), registry=registry
        )
        self._tensor_bytes = Counter(
            "omnistage_connector_sent_bytes_total", "Bytes of tensors given to the next stage.", (*names, "transport"), registry=registry
        )
        self.first_output = Histogram(
            "omnistage_stage_first_output_seconds", "From Opened to the first output.", names, registry=registry, buckets=_SECONDS
        ).labels(**labels)
        self.duration = Histogram(
            "omnistage_stage_session_seconds", "From Open to the end of a session.", names, registry=registry, buckets=_SECONDS
        ).labels(**labels)
        self._ended = Counter("omnistage_stage_sessions_total", "Sessions by how they ended.", (*names, "reason"), registry=registry)
        self._labels = labels

    def sent(self, transport: str, size: int) -> None:
        """Count a tensor that went to the next stage. transport: inline or shared_memory."""
        self._tensors.labels(**self._labels, transport=transport).inc()
        self._tensor_bytes.labels(**self._labels, transport=transport).inc(size)

    def ended(self, reason: str) -> None:
        """Count a session. reason: OK, CANCELLED, INTERNAL or a name in ErrorReason."""
        self._ended.labels(**self._labels, reason=reason).inc()
