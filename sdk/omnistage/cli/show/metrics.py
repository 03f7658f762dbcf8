"""Serves the metrics of all processes of a stack on one Prometheus page. For each request it fetches the page of each process, and adds a
label `process` to each sample."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from http.client import HTTPConnection, HTTPException

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from omnistage.client.errors import StackError
from omnistage.host.addresses import host_and_port
from omnistage.host.metrics import new_registry, serve_metrics

LAUNCHER = "launcher"
"""Name of the process that serves the page, for its own metrics."""

SILENCE_S = 2.0
"""A process that sends nothing for so long is left out: its machine swaps, or it was stopped."""

LOOK_S = 5.0
"""Pages that take longer are left out: a scraper gives up after 10 s by default."""

MAX_PAGE_BYTES = 8 << 20
"""The most bytes of one process's page; ours have some 20 KiB."""

FETCHERS = 64

Addresses = Callable[[], Mapping[str, str]]
"""HOST:PORT of the page of every process, by its name; empty for a process that does not run. Called from any thread."""


def serve_stack_metrics(address: str, addresses: Addresses) -> str:
    """Serve the page until this process ends; returns its HOST:PORT. Raises StackError if the address cannot be listened on."""
    host, port = host_and_port(address)
    registry = CollectorRegistry()
    registry.register(StackCollector(addresses))
    try:
        bound = serve_metrics(host, port, registry)
    except OSError as error:
        raise StackError(f"cannot listen on {address} for metrics: {error.strerror}", hint="Choose another --metrics.") from error
    return f"{address.rpartition(':')[0]}:{bound}"


class StackCollector(Collector):
    """Collects the metrics of all processes when the page is asked for. It fetches the pages only once at a time."""

    def __init__(self, addresses: Addresses) -> None:
        self._addresses = addresses
        self._own_registry = new_registry()
        self._one_at_a_time = threading.Lock()
        self._looked_at = 0.0  # time.monotonic() of the last fetch
        self._last: dict[str, list[Metric] | None] = {}
        self._fetchers = ThreadPoolExecutor(FETCHERS, "omnistage-metrics-fetcher")

    def collect(self) -> Iterator[Metric]:
        """Yield a metric that says which processes answered, and each other metric once, with the samples of all processes."""
        came_at = time.monotonic()
        with self._one_at_a_time:
            # A fetch that began after this call, for another caller, is new enough. One more would wait again for a process that hangs.
            if self._looked_at < came_at:
                self._looked_at = time.monotonic()
                self._last = self._pages()
            pages = self._last
        up = GaugeMetricFamily("omnistage_process_up", "1 for a process that gave its metrics, 0 for one that did not.", labels=["process"])
        merged: dict[str, Metric] = {}
        for process, page in pages.items():
            up.add_metric([process], int(page is not None))
            for family in page or ():
                metric = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                metric.samples.extend(sample._replace(labels={**sample.labels, "process": process}) for sample in family.samples)
        yield up
        yield from merged.values()

    def _pages(self) -> dict[str, list[Metric] | None]:
        """The metrics of each process, by its name; None for a process that did not answer."""
        futures = {name: self._fetchers.submit(fetch_page, address) for name, address in self._addresses().items()}
        wait(futures.values(), timeout=LOOK_S)
        pages = {name: _page(fetching) for name, fetching in futures.items()}
        return {**pages, LAUNCHER: _parse_page(generate_latest(self._own_registry))}


def _page(fetching: Future[list[Metric] | None]) -> list[Metric] | None:
    """The result of a fetch; None if it has not ended: then it is given up."""
    if not fetching.done():
        fetching.cancel()
        return None
    return fetching.result()


def fetch_page(address: str) -> list[Metric] | None:
    """The metrics of the process at HOST:PORT; None if it gives no page: it has just ended, or hangs. Blocks."""
    if not address:
        return None
    connection = HTTPConnection(address, timeout=SILENCE_S)  # Unlike urlopen it uses no proxies.
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        is_page = answer.status == 200 and answer.length is not None and answer.length <= MAX_PAGE_BYTES
        return _parse_page(answer.read()) if is_page else None  # `read` raises if the body is shorter than its length.
    except (OSError, HTTPException, ValueError):
        return None
    finally:
        connection.close()


def _parse_page(page: bytes) -> list[Metric]:
    """The metrics on a page. Raises ValueError for a text that is no such page."""
    return list(text_string_to_metric_families(page.decode()))
