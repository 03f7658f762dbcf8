"""The destination of the spans of requests: none, unless `--otlp` names a collector.

OpenTelemetry is an extra, so `omnistage.host.otlp` is imported only if a collector is named.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from omnistage.host.errors import StartError
from omnistage.host.spans import Tracer


@asynccontextmanager
async def tracing(url: str, service: str) -> AsyncIterator[Tracer]:
    """A tracer for the life of a process. url: as `--otlp`; empty: spans go nowhere. service: the name under which its spans are found.

    At an orderly end the spans that wait get a moment to be sent; a process that breaks does not wait for that. Raises StartError."""
    if not url:
        yield Tracer()
        return
    try:
        from omnistage.host.otlp import OtlpTracer
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "opentelemetry":
            raise
        raise StartError(
            f"--otlp needs packages that are not installed ({error.name} is missing): `make wheels` in a clone, then "
            "pip install --find-links dist 'omnistage[otel]'"
        ) from None
    tracer = OtlpTracer(url, service)
    yield tracer
    await tracer.close()
