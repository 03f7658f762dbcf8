"""The page of metrics of a process that has no descriptors left, and of one whose visitors say nothing."""

from __future__ import annotations

import socket
import subprocess
import sys
import textwrap

import pytest
from prometheus_client import CollectorRegistry, Counter

from omnistage.host.metrics_page import serve_metrics


def test_without_descriptors_it_waits_and_answers_when_there_are_some_again() -> None:
    """Whoever asked meanwhile is answered too. A thread that tries all the time would compute all the time."""
    code = """
        import os, resource, socket, time
        from prometheus_client import CollectorRegistry, Counter
        from omnistage.host.metrics_page import serve_metrics
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
    monkeypatch.setattr("omnistage.host.metrics_page._Handler.timeout", 0.1)
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
