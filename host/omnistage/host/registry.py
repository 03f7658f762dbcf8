"""The metrics of a process: a registry that already has the metrics that all processes share."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry, Info, PlatformCollector, ProcessCollector, disable_created_metrics

UNKNOWN = "unknown"
"""The version of a source tree that is not installed."""


def new_registry() -> CollectorRegistry:
    """A registry with the version, the Python, and the processor time, memory and descriptors of this process."""
    # They would tell when each counter was made, which is always when the process began.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    Info("omnistage_build", "The version that runs.", registry=registry).info({"version": _version()})
    return registry


def _version() -> str:
    try:
        return version("omnistage")
    except PackageNotFoundError:
        return UNKNOWN
