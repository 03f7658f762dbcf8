"""The way of spans: bounded, beside the work that they describe, and only if the settings and the packages allow it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from helpers.bare import bare_environment, bare_python
from helpers.collector import collector
from omnistage.host.errors import StartError
from omnistage.host.otlp import MAX_WAITING, OtlpTracer
from omnistage.host.process import tracing
from omnistage.host.settings import read_settings
from omnistage.host.spans import Tracer
from omnistage.router.settings import RouterSettings

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
    assert MAX_WAITING <= len(found) <= MAX_WAITING + MAX_BATCH
    assert "first 0" in found and "then 0" not in found


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
        assert type(tracer) is Tracer
        assert (span.metadata, span.trace_id) == ((PARENT,), "")


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
    assert "pip install --find-links dist 'omnistage[otel]'" in ended.stderr
    assert "Traceback" not in ended.stderr
