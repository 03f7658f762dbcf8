"""The pages of several processes as one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from socketserver import BaseRequestHandler
from urllib.request import ProxyHandler, build_opener

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics_families
from prometheus_client.parser import text_string_to_metric_families

from helpers.http_servers import running
from helpers.metrics import value
from omnistage.cli.show.metrics import StackCollector, serve_stack_metrics
from omnistage.client.errors import StackError
from omnistage.host.metrics import serve_metrics


def serving(name: str, count: int) -> str:
    """The address of a page of one process."""
    registry = CollectorRegistry()
    Counter("seen", 'Said with "quotes", a \\ and\na second line.', ("who",), registry=registry).labels(who=f'the "{name}" \\').inc(count)
    Histogram("took_seconds", "How long.", registry=registry, buckets=(1, 2)).observe(count)
    if name == "router":
        Gauge("places", "Of the router alone.", registry=registry).set(7)
    return f"127.0.0.1:{serve_metrics('127.0.0.1', 0, registry)}"


def page(addresses: Mapping[str, str], accept: str = "text/plain") -> str:
    """The launcher's page of metrics."""
    shown = serve_stack_metrics("127.0.0.1:0", lambda: addresses)
    opener = build_opener(ProxyHandler({}))
    opener.addheaders = [("Accept", accept)]
    with opener.open(f"http://{shown}/metrics", timeout=60) as response:
        text: str = response.read().decode()
        return text


@contextmanager
def saying(answer: bytes | None) -> Iterator[str]:
    """A server that says this to each of its visitors, whatever they ask; None: that says nothing."""
    over = threading.Event()

    class Visit(BaseRequestHandler):
        def handle(self) -> None:
            if answer is None:
                over.wait(60)
            else:
                self.request.recv(1 << 16)
                self.request.sendall(answer)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Visit)
    with running([server], over):
        yield f"127.0.0.1:{server.server_port}"


def test_families_of_all_processes_are_merged_and_every_sample_says_whose_it_is() -> None:
    text = page({"talker-0": serving("talker", 1), "talker-1": serving("talker", 2), "router": serving("router", 3)})
    lines = text.splitlines()
    for name in ("seen_total", "took_seconds", "places", "omnistage_process_up", "process_cpu_seconds_total"):
        assert [line.split()[1] for line in lines if line.split()[:1] == ["#"] and line.split()[2] == name] == ["HELP", "TYPE"], name
    families = list(text_string_to_metric_families(text))
    assert all("process" in sample.labels for family in families for sample in family.samples)
    assert value(families, "seen_total", process="talker-1", who='the "talker" \\') == 2
    assert [family.documentation for family in families if family.name == "seen"] == ['Said with "quotes", a \\ and\na second line.']
    assert value(families, "took_seconds_bucket", process="router", le="2.0") == 0
    assert (value(families, "took_seconds_count", process="router"), value(families, "places")) == (1, 7)
    assert {value(families, "omnistage_process_up", process=name) for name in ("talker-0", "talker-1", "router", "launcher")} == {1}


def test_the_page_is_good_in_the_other_format_too() -> None:
    text = page({"router": serving("router", 3)}, accept="application/openmetrics-text; version=1.0.0")
    assert value(list(open_metrics_families(text)), "seen_total", process="router") == 3


ANSWERS = {
    "nothing": None,
    "hangs up": b"",
    "no HTTP": b"nonsense\r\n\r\n",
    "an error": b"HTTP/1.0 500 Oh\r\nContent-Length: 13\r\n\r\nseen_total 1\n",
    "no metrics": b"HTTP/1.0 200 OK\r\nContent-Length: 18\r\n\r\nthis is { no page\n",
    "no text": b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\n\xff\xfe\n",
    "cut off": b"HTTP/1.0 200 OK\r\nContent-Length: 99\r\n\r\nseen_total 1\n",
    "too long": b"HTTP/1.0 200 OK\r\nContent-Length: 99999999999\r\n\r\nseen_total 1\n",
    "no length": b"HTTP/1.0 200 OK\r\n\r\nseen_total 1\n",
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_process_that_gives_no_page_is_left_out_and_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omnistage.cli.show.metrics.SILENCE_S", 0.3)
    good = serving("talker", 5)
    with saying(ANSWERS[name]) as bad:
        families = list(text_string_to_metric_families(page({"bad": bad, "ended": "", "talker": good})))
    assert {name: value(families, "omnistage_process_up", process=name) for name in ("bad", "ended")} == {"bad": 0, "ended": 0}
    assert {sample.labels["process"] for family in families if family.name == "seen" for sample in family.samples} <= {"talker"}


def test_a_look_ends_in_time_however_many_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than there are threads to ask them with: the last are not even asked."""
    monkeypatch.setattr("omnistage.cli.show.metrics.FETCHERS", 2)
    monkeypatch.setattr("omnistage.cli.show.metrics.SILENCE_S", 1.0)
    monkeypatch.setattr("omnistage.cli.show.metrics.LOOK_S", 0.5)
    with saying(None) as silent:
        families = list(StackCollector(lambda: {str(number): silent for number in range(20)}).collect())
    assert [value(families, "omnistage_process_up", process=str(number)) for number in range(20)] == [0] * 20
    assert value(families, "omnistage_process_up", process="launcher") == 1


def test_a_port_that_is_taken_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(StackError, match=f"cannot listen on {address} for metrics") as failed:
            serve_stack_metrics(address, dict)
    assert "--metrics" in failed.value.hint
