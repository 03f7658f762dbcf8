"""Ends a stack that has had no requests for a while."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from omnistage.cli.ending import RUNNING
from omnistage.cli.layout import GATEWAY, ROUTER
from omnistage.client.threads import beside

LOOKS = 10
"""How many times the metrics are read within the time limit."""

MAX_PERIOD_S = 60.0
"""The longest pause between two readings, in seconds."""

ASKED = ("omnistage_router_requests_total", "omnistage_gateway_requests_total")
"""Metrics that count requests. An answer over HTTP counts twice, a page that is opened counts once."""

LOOKING = frozenset(("/health", "/ready", "/metrics", "/v1/models", "/v1/models/{model}", "/v1/audio/voices"))
"""Endpoints of the gateway whose calls are no real requests: a forgotten page, or a monitor, may call them for ever."""

NOWHERE = "404"
"""Status of a request for a missing path, as scanners send it: no real request either."""

Count = frozenset[tuple[str, tuple[tuple[str, str], ...], float]]
"""The samples of the metrics that count requests: the name, the labels and the value of each."""


@asynccontextmanager
async def end_when_idle(limit_s: float, addresses: Callable[[], Mapping[str, str]], end: Callable[[], object]) -> AsyncIterator[None]:
    """A context in which `end` is called when there has been no request for limit_s seconds; 0: never. addresses: returns HOST:PORT of the
    metrics of all processes, by name."""
    watching = asyncio.create_task(_watch(limit_s, addresses, end)) if limit_s else None
    try:
        yield
    finally:
        if watching is not None:
            watching.cancel()
            await asyncio.wait({watching})


async def _watch(limit_s: float, addresses: Callable[[], Mapping[str, str]], end: Callable[[], object]) -> None:
    """Compare the counts of requests again and again, and call `end` when they have not changed for limit_s."""
    clock = asyncio.get_running_loop().time
    asked_at, before = clock(), await count_requests(addresses())
    while clock() - asked_at < limit_s:
        await asyncio.sleep(min(limit_s / LOOKS, MAX_PERIOD_S))
        counts = await count_requests(addresses())
        if counts is None or counts != before:
            asked_at, before = clock(), counts
    end()


def asks(labels: Mapping[str, str]) -> bool:
    """Whether a counted call with these labels was a real request."""
    return labels.get("endpoint") not in LOOKING and labels.get("status") != NOWHERE


async def count_requests(addresses: Mapping[str, str]) -> Count | None:
    """The counts of requests. They differ from earlier counts if a request came since, or a process was started again. None: an answer is
    running, or a process gives no metrics. addresses: HOST:PORT of the metrics of processes, by name."""

    def look() -> Count | None:
        from omnistage.cli.stack_metrics import fetch_page

        pages = [fetch_page(address) for name in (ROUTER, GATEWAY) if (address := addresses.get(name))]
        samples = [sample for page in pages for family in page or () for sample in family.samples]
        if None in pages or any(sample.value for sample in samples if sample.name == RUNNING):
            return None
        request_samples = (sample for sample in samples if sample.name in ASKED and asks(sample.labels))
        return frozenset((sample.name, tuple(sample.labels.items()), sample.value) for sample in request_samples)

    return await beside(look, "omnistage-idle-look")
