"""Logs, metrics and spans of a server: bounded, and beside the work that they describe, whoever does not read, ask or answer."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from importlib.metadata import version
from pathlib import Path
from typing import TextIO

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram

from helpers import lengths
from helpers.bare import bare_environment, bare_python
from helpers.collector import collector
from omnistage.host.errors import StartError
from omnistage.host.logs import LogWriter
from omnistage.host.metrics import MAX_VISITORS, new_registry, serve_metrics
from omnistage.host.otlp import MAX_WAITING, OtlpTracer
from omnistage.host.process import tracing
from omnistage.host.settings import read_settings
from omnistage.host.spans import Tracer
from omnistage.router.settings import RouterSettings


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


def served(host: str = "127.0.0.1") -> int:
    """The port of a page with a counter."""
    registry = CollectorRegistry()
    Counter("seen", "x", registry=registry).inc()
    return serve_metrics(host, 0, registry)


def page_of(host: str, port: int) -> bytes:
    with socket.create_connection((host, port), timeout=30) as visitor:
        visitor.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        return b"".join(iter(lambda: visitor.recv(1 << 16), b""))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_visitor_who_says_nothing_is_left(host: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("omnistage.host.metrics._Handler.timeout", 0.1)
    port = served(host)
    with socket.create_connection((host, port), timeout=30) as silent:
        assert silent.recv(1) == b""
    assert b"seen_total 1.0" in page_of(host, port) and capfd.readouterr().err == ""


def test_visitors_who_say_nothing_take_a_bounded_number_of_threads_and_no_place_from_others() -> None:
    """Three times as many visitors as the limit come and say nothing, or a line and no more. Visitors that ask meanwhile are all
    answered."""
    port = served()
    with ExitStack() as visits:
        for number in range(3 * MAX_VISITORS):
            visitor = visits.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
            if number % 2:
                visitor.sendall(b"GET /metrics HTTP/1.0\r\n")
            if number % 16 == 0:
                assert b"seen_total 1.0" in page_of("127.0.0.1", port)
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
    connection = HTTPConnection("127.0.0.1", served(), timeout=30)
    connection.request("GET", path)
    answer = connection.getresponse()
    assert answer.status == status and answer.read().decode().startswith(begin)
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


PARENT = ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
MAX_BATCH = 512
"""Spans that the SDK sends in one call."""


async def test_a_collector_that_does_not_answer_stops_nobody_and_fills_nothing() -> None:
    """If too many spans wait, the oldest are dropped; ending a span never waits."""
    with collector(silent=True) as spans:
        tracer = OtlpTracer(spans.url, "one")
        for number in range(MAX_BATCH + 1):
            tracer.begin(f"first {number}", ()).end("OK")
        assert spans.asked.wait(60)  # From here on the sending thread is in its call.
        for number in range(2 * MAX_WAITING):
            tracer.begin(f"then {number}", ()).end("OK")
        spans.release()
        found = {span.name for span in spans.wait_for(lambda found: f"then {2 * MAX_WAITING - 1}" in {span.name for span in found})}
        await tracer.close()
    assert MAX_WAITING <= len(found) <= MAX_WAITING + MAX_BATCH and "first 0" in found and "then 0" not in found


async def test_a_span_passes_on_what_it_was_given_and_its_own_place() -> None:
    with collector() as spans:
        async with tracing(spans.url, "one") as tracer:
            outer = tracer.begin("outer", (PARENT, ("tracestate", "a=b"), ("tracestate", "c=d")))
            inner = tracer.begin("inner", outer.metadata)
            outer.phase("later", 0.0, 0.0)  # This moment is long before the span began.
            inner.end("STAGE_LOST", {"n": 3})
            outer.end("CANCELLED")
    (parent, state) = outer.metadata
    one, other = spans.one("one", "outer"), spans.one("one", "inner")
    assert parent == ("traceparent", f"00-{one.trace_id}-{one.id}-01") and state == ("tracestate", "a=b,c=d")
    assert (one.trace_id, one.parent, other.parent) == (outer.trace_id, PARENT[1].split("-")[2], one.id)
    assert (one.error, other.error) == ("", "STAGE_LOST")
    assert other.attributes == {"n": 3, "omnistage.reason": "STAGE_LOST", "error.type": "STAGE_LOST"}
    assert one.holds(spans.one("one", "later"))


async def test_without_a_collector_what_was_given_is_passed_on_and_no_more() -> None:
    async with tracing("", "one") as tracer:
        span = tracer.begin("outer", (PARENT,))
        span.event("x")
        span.end("OK")
        assert type(tracer) is Tracer and (span.metadata, span.trace_id) == ((PARENT,), "")


@pytest.mark.parametrize("url", ["", "http://127.0.0.1:4317", "https://collector.example.com:4317/", "http://[::1]:4317"])
def test_collectors_that_can_be_named(url: str) -> None:
    assert read_settings(RouterSettings, ["--otlp", url], "router").otlp == url


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("127.0.0.1:4317", "is no collector: give http://HOST:PORT such as http://127.0.0.1:4317"),
        ("grpc://127.0.0.1:4317", "is no collector"),
        ("http://", "is no collector"),
        ("http://127.0.0.1:4318/v1/traces", "has a path: spans go by OTLP over gRPC, to a port such as 4317; give http://HOST:PORT alone"),
        ("http://127.0.0.1", "has no port"),
        ("http://127.0.0.1:0", "has no port that a collector can have"),
        ("http://127.0.0.1:99999", "has no possible port"),
    ],
)
def test_collectors_that_cannot_be(url: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartError) as raised:
        read_settings(RouterSettings, ["--otlp", url], "router")
    assert "--otlp: " in str(raised.value) and told in str(raised.value)
    monkeypatch.setenv("OMNISTAGE_OTLP", url)
    with pytest.raises(StartError, match=r"^OMNISTAGE_OTLP: "):
        read_settings(RouterSettings, [], "router")


@pytest.mark.parametrize(("variable", "value"), [("OTEL_EXPORTER_OTLP_COMPRESSION", "zip"), ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "99999")])
async def test_a_variable_of_opentelemetry_that_makes_no_sense(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(StartError, match="names begin with OTEL_"):
        async with tracing("http://127.0.0.1:4317", "one"):
            pass


@pytest.mark.parametrize("module", ["omnistage.router", "omnistage.thinker"])
def test_without_the_extra_a_server_says_what_to_install(module: str, tmp_path: Path) -> None:
    words = ["--stages", "thinker=127.0.0.1:1,talker=127.0.0.1:1,code2wav=127.0.0.1:1", "--pipeline", "toy"]
    command = [*bare_python(), "-m", module, *(words if module == "omnistage.router" else ["--family", "toy"]), "--log-format", "json"]
    environment = bare_environment(tmp_path, "server")
    ended = subprocess.run(
        [*command, "--otlp", "http://127.0.0.1:4317"], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert ended.returncode == 1, ended.stderr
    assert "--otlp needs packages that are not installed (" in ended.stderr
    assert "pip install --find-links dist 'omnistage[otel]'" in ended.stderr and "Traceback" not in ended.stderr


LIMIT_S = 60.0
LINE = "x" * 999 + "\n"


@contextmanager
def pipe() -> Iterator[tuple[TextIO, int]]:
    """The two ends of a pipe: one to read, one to write."""
    reading, writing = os.pipe()
    with os.fdopen(reading) as reader:
        yield reader, writing
    os.close(writing)


def test_every_line_of_many_threads_is_written_once():
    with pipe() as (reader, end):
        writer = LogWriter(end)
        threads = [threading.Thread(target=lambda of=of: [writer.write(f"{of} {n}\n") for n in range(500)]) for of in range(4)]
        for thread in threads:
            thread.start()
        lines = [reader.readline().split() for _ in range(2000)]
        for thread in threads:
            thread.join(LIMIT_S)
    for of in range(4):
        assert [int(number) for name, number in lines if name == str(of)] == list(range(500))


def test_where_nobody_reads_lines_are_dropped_and_counted():
    with pipe() as (reader, end):
        writer = LogWriter(end, max_waiting=10)
        for _ in range(1000):  # These are far more lines than the pipe and the queue have room for: no write may wait.
            writer.write(LINE)
        lines: list[str] = []
        reading = threading.Thread(target=lambda: lines.extend(iter(reader.readline, "last\n")))
        reading.start()
        writer.drain(LIMIT_S)
        writer.write("last\n")
        reading.join(LIMIT_S)
    dropped = [line for line in lines if line != LINE]
    assert dropped and all(line.endswith("log lines were dropped here: nobody read them\n") for line in dropped)
    assert len(lines) - len(dropped) + sum(int(line.split()[0]) for line in dropped) == 1000


def test_what_was_written_before_is_out_after_a_drain():
    with pipe() as (reader, end):
        writer = LogWriter(end)
        for n in range(50):
            writer.write(f"{n}\n")
        writer.drain(LIMIT_S)
        os.set_blocking(reader.fileno(), False)
        assert os.read(reader.fileno(), 1 << 16).decode().split() == [str(n) for n in range(50)]


def test_a_reader_that_is_gone_ends_nothing():
    with pipe() as (reader, end):
        reader.close()
        writer = LogWriter(end)
        for _ in range(100):
            writer.write(LINE)
        writer.drain(LIMIT_S)


ENDING = """
import structlog
from omnistage.host.logs import configure_logs
configure_logs("info", "json")
for n in range(1000):
    structlog.get_logger().info("line", n=n, filler="x" * 900)
"""


def test_a_process_whose_log_nobody_reads_ends_well():
    reading, writing = os.pipe()
    done = subprocess.run([sys.executable, "-c", ENDING], stderr=writing, timeout=LIMIT_S, check=False)
    os.close(writing)
    assert done.returncode == 0
    os.close(reading)


UNREAD = """
import sys, structlog
from omnistage.host.logs import MAX_WAITING
from omnistage.host.logs import configure_logs
configure_logs("info", "json")
for n in range(2 * MAX_WAITING):
    structlog.get_logger().info("line", n=n, filler="x" * 900)
print("written", flush=True)
sys.stdin.read()
"""


def test_a_log_of_json_says_in_json_that_lines_were_dropped():
    command = [sys.executable, "-c", UNREAD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            assert process.stdout.readline() == "written\n"
            told = next(event for event in map(json.loads, process.stderr) if event["event"] != "line")
        finally:
            process.kill()
    assert (told["event"], told["level"]) == ("log.dropped", "warning")
    assert told["lines"] > 0 and told["timestamp"].endswith("Z")


COMPLAINTS = """
import logging
from grpc._cython.cygrpc import ExecuteBatchError
from omnistage.host.logs import configure_logs
configure_logs("info", "json")
for what in ("SendStatusFromServerOperation", "SendMessageOperation"):
    try:
        raise ExecuteBatchError(f'Failed "execute_batch": (<grpc._cython.cygrpc.{what} object>,)')
    except ExecuteBatchError:
        logging.getLogger("grpc._cython.cygrpc").exception("raised in core")
logging.getLogger("grpc._cython.cygrpc").error("SendStatusFromServerOperation, without an exception")
"""


def test_a_status_that_nobody_waited_for_is_no_error_and_all_else_is() -> None:
    ended = subprocess.run([sys.executable, "-c", COMPLAINTS], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    with_traceback, without = map(json.loads, ended.stderr.splitlines())
    assert "SendMessageOperation" in with_traceback["exception"] and with_traceback["level"] == "error"
    assert without["event"] == "SendStatusFromServerOperation, without an exception"


SERVERS = ("thinker", "talker", "code2wav", "diffusion", "router")


@lengths.drawn_cells(2, "server", SERVERS)
def test_a_server_starts_without_rich_and_does_not_keep_others_from_it(server: str) -> None:
    code = f"""
import importlib, sys
importlib.import_module("omnistage.{server}.__main__")
import structlog
assert structlog.dev.default_exception_formatter is structlog.dev.plain_traceback
assert not [name for name in sys.modules if name.partition(".")[0] == "rich"]
import rich.console
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
