"""The page of metrics of a process that has no descriptors left, and of one whose visitors say nothing."""

from __future__ import annotations

import socket
import subprocess
import sys
import textwrap
import threading
from contextlib import ExitStack
from http.client import HTTPConnection
from importlib.metadata import version

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram

from omnistage.host.metrics import MAX_VISITORS, new_registry, serve_metrics


def test_without_descriptors_it_waits_and_answers_when_there_are_some_again() -> None:
    """Requests that come meanwhile are answered too. A thread that tried without a pause would compute all the time."""
    code = """
        import os, resource, socket, time
        from prometheus_client import CollectorRegistry, Counter
        from omnistage.host.metrics import serve_metrics
        registry = CollectorRegistry()
        Counter("seen", "x", registry=registry).inc()
        port = serve_metrics("127.0.0.1", 0, registry)
        visitor = socket.socket()
        lowest = os.dup(0)
        os.close(lowest)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        visitor.connect(("127.0.0.1", port))
        visitor.sendall(b"GET /metrics HTTP/1.0\\r\\n\\r\\n")
        before = time.process_time()
        time.sleep(2)
        print("waits" if time.process_time() - before < 0.5 else "computes")
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        page = b""
        while part := visitor.recv(1 << 16):
            page += part
        print("seen_total 1.0" in page.decode())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("waits\nTrue\n", "")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_visitor_who_says_nothing_is_left(host: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("omnistage.host.metrics._Handler.timeout", 0.1)
    registry = CollectorRegistry()
    Counter("seen", "x", registry=registry).inc()
    port = serve_metrics(host, 0, registry)
    with socket.create_connection((host, port), timeout=30) as silent:
        assert silent.recv(1) == b""
    with socket.create_connection((host, port), timeout=30) as visitor:
        visitor.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        page = b"".join(iter(lambda: visitor.recv(1 << 16), b""))
    assert b"seen_total 1.0" in page
    assert capfd.readouterr().err == ""


def test_visitors_who_say_nothing_take_a_bounded_number_of_threads_and_no_place_from_others() -> None:
    """Three times as many visitors as the limit come and say nothing, or a line and no more. Visitors that ask meanwhile are all
    answered."""
    registry = CollectorRegistry()
    Counter("seen", "x", registry=registry).inc()
    port = serve_metrics("127.0.0.1", 0, registry)
    with ExitStack() as visits:
        for number in range(3 * MAX_VISITORS):
            visitor = visits.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
            if number % 2:
                visitor.sendall(b"GET /metrics HTTP/1.0\r\n")
            if number % 16 == 0:
                with socket.create_connection(("127.0.0.1", port), timeout=30) as asking:
                    asking.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
                    assert b"seen_total 1.0" in b"".join(iter(lambda: asking.recv(1 << 16), b""))
        visited = [thread for thread in threading.enumerate() if thread.name == "omnistage-metrics-visitor"]
        # The page closed some connections; their threads may not know yet.
        for thread in visited[:-MAX_VISITORS]:
            thread.join(30)
        assert sum(thread.is_alive() for thread in visited) <= MAX_VISITORS


@pytest.mark.parametrize(
    ("path", "status", "begin"),
    [
        ("/metrics", 200, "# HELP"),
        ("/", 200, "# HELP"),
        ("/metrics?name[]=seen_total", 200, "# HELP seen_total"),
        ("/healthz", 200, "ok\n"),
        ("/healthz/", 404, "there are /metrics and /healthz"),
        ("/metrics/x", 404, "there are /metrics and /healthz"),
    ],
)
def test_each_path_has_its_own_answer(path: str, status: int, begin: str) -> None:
    registry = CollectorRegistry()
    Counter("seen", "x", registry=registry).inc()
    connection = HTTPConnection("127.0.0.1", serve_metrics("127.0.0.1", 0, registry), timeout=30)
    connection.request("GET", path)
    answer = connection.getresponse()
    assert answer.status == status
    assert answer.read().decode().startswith(begin)
    connection.close()


def test_every_process_shows_its_version_its_memory_and_its_time() -> None:
    registry = new_registry()
    assert registry.get_sample_value("omnistage_build_info", {"version": version("omnistage")}) == 1
    assert (registry.get_sample_value("process_resident_memory_bytes") or 0) > 1e6
    assert (registry.get_sample_value("process_cpu_seconds_total") or 0) > 0


def test_no_series_tells_when_a_counter_was_made() -> None:
    registry = new_registry()
    Counter("seen", "x", registry=registry).inc()
    Histogram("took", "x", registry=registry).observe(1)
    assert [sample.name for family in registry.collect() for sample in family.samples if sample.name.endswith("_created")] == []
