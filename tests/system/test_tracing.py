"""Spans of real processes at a real collector: one tree for a request, from the client's own span to the last stage."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from helpers import lengths
from helpers.ask import WholeAnswer, ask, read, read_all, refused, request
from helpers.collector import CollectedSpan, Collector, collector
from helpers.disturbed import SLOW, SLOWER_SOUND, ask_through, kill_when, text_chunks
from helpers.fleet import fleet
from helpers.ports import take_address
from helpers.servers import CHAIN, ServerProcess, ServerProcesses, omni_stub, stack
from omnistage.cli.stack.layout import ServerOptions
from omnistage.cli.stack.pipelines import Choice, layout_of
from omnistage.cli.stack.stack import Stack as LaunchedStack
from omnistage.models.toy import formulas

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
UNKNOWN, BAD, UNRECORDED = "c" * 32, "b" * 32, "a" * 32
"""Traces of the requests that are refused and of those that their client does not record."""
STAGE_PHASES = {"open", "prefill", "generate"}


def below(trace_id: str, flags: str = "01") -> tuple[tuple[str, str], ...]:
    """Metadata of a request below a span of its client."""
    return (("traceparent", f"00-{trace_id}-{PARENT}-{flags}"),)


GIVEN = (*below(TRACE), ("tracestate", "a=b"))


@contextmanager
def traced(folder: Path, url: str, **options: Any) -> Iterator[ServerProcesses]:
    """A toy chain that sends its spans there; when this returns, its processes have ended, and sent all."""
    router_args = ["--otlp", url, *options.pop("router_args", ())]
    with stack(folder, stage_args=["--otlp", url], router_args=router_args, **options) as running:
        yield running
    assert [server.process.returncode for server in running.processes()] == [0] * len(running.processes())


def lines(server: ServerProcess, event: str) -> list[Mapping[str, Any]]:
    """The lines in which a server logged this event."""
    logged = [json.loads(line) for line in server.log().splitlines()]
    return [line for line in logged if line["event"] == event]


def chain(spans: Collector, root: CollectedSpan) -> list[CollectedSpan]:
    """The span of a router and those of the stages behind it, each below the one before."""
    found = [root]
    for kind in CHAIN:
        (below,) = [span for span in spans.of(f"omnistage-{kind}", kind) if span.parent == found[-1].id]
        found.append(below)
    return found


@dataclass(frozen=True)
class TracedChain:
    """The records of a chain about several requests, one after the other: `given` below a span of its client, three without one, some that
    their client does not record, and two that were refused."""

    chain: ServerProcesses
    spans: Collector
    given: WholeAnswer

    def root(self, trace_id: str) -> CollectedSpan:
        """The router's span of the request that brought this trace."""
        (found,) = [span for span in self.spans.of("omnistage-router", "generate") if span.trace_id == trace_id]
        return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def told(tmp_path_factory: pytest.TempPathFactory) -> TracedChain:
    folder = tmp_path_factory.mktemp("logs")
    with collector() as spans, traced(folder, spans.url, options=SLOW) as running:
        async with omni_stub(running.address) as stub:
            (await ask(stub, request("hello", 3), metadata=below(UNRECORDED, "00"))).check_toy(3, "hello")
            given = await ask(stub, request("hello", 3, request_id="r-1"), metadata=GIVEN)
            (await ask(stub, request("hello", 3), metadata=below(UNRECORDED, "00"))).check_toy(3, "hello")
            for _ in range(2):
                await ask(stub, request("hello", 3))
            await ask(stub, request("hello", 3), metadata=below("0" * 32))  # Not a possible one.
            await refused(stub, request("tell nobody", model="gpt"), metadata=below(UNKNOWN))
            await refused(stub, request("tell nobody", thinker={"stop": ["tell nobody" * 99]}), metadata=below(BAD))
    return TracedChain(running, spans, given)


# One request -----------------------------------------------------------------------------------------------------------------------------


def test_a_request_is_one_tree_below_the_span_of_its_client(told: TracedChain) -> None:
    answer, running, spans = told.given, told.chain, told.spans
    answer.check_toy(3, "hello")
    root = told.root(TRACE)
    assert root.parent == PARENT
    found = chain(spans, root)
    for outer, inner in pairwise(found):
        assert outer.holds(inner), (outer, inner)
    for span in found:
        parts = spans.below(span)
        assert all(span.holds(part) for part in parts.values())
        assert span.error == "" and span.attributes["omnistage.reason"] == "OK"
    own = [span for span in spans.spans if span.trace_id == TRACE]
    assert len(own) == sum(1 + len(spans.below(span)) for span in found)
    _check_router(spans, root, answer.started.session_id if answer.started else "")
    for span, further in zip(found[1:], ({"transfer"}, {"transfer"}, set()), strict=True):
        _check_stage(spans, span, further)
        assert span.attributes["omnistage.replica"] == running.addresses[span.name]
        assert span.attributes["omnistage.session_id"] == root.attributes["omnistage.session_id"]
        assert span.resource["process.pid"] == running.stages[span.name].pid
    for producer, reader in pairwise(found[1:]):
        assert spans.below(producer)["prefill"].ended_ns <= spans.below(reader)["prefill"].begun_ns, "it reads when its input comes"
    assert running.router is not None
    (line,) = [line for line in lines(running.router, "answer.done") if line["request_id"] == "r-1"]
    assert line["trace_id"] == TRACE


def _check_router(spans: Collector, root: CollectedSpan, session_id: str) -> None:
    told = {"session_id": session_id, "request_id": "r-1", "pipeline": "toy", "client": "127.0.0.1", "finish_reason": "stop"}
    assert {name: root.attributes[f"omnistage.{name}"] for name in told} == told
    assert root.attributes["gen_ai.usage.output_tokens"] == formulas.NATURAL_LENGTH
    assert set(spans.below(root)) == {"open"}  # It did not have to wait for its place.
    opened, text, audio = spans.below(root)["open"], root.event("first_text"), root.event("first_audio")
    assert opened.ended_ns <= text.at_ns <= audio.at_ns <= root.ended_ns


def _check_stage(spans: Collector, span: CollectedSpan, further: set[str]) -> None:
    parts = spans.below(span)
    assert set(parts) == STAGE_PHASES | further
    opened, prefill, generate = (parts[name] for name in ("open", "prefill", "generate"))
    assert opened.ended_ns <= prefill.begun_ns <= prefill.ended_ns == span.event("first_output").at_ns == generate.begun_ns
    if "transfer" in parts:
        transfer = parts["transfer"]
        assert generate.begun_ns <= transfer.begun_ns
        assert transfer.attributes["omnistage.pieces"] > 0 and transfer.attributes["omnistage.waited_s"] >= 0
    if span.name == "thinker":
        assert sum(_sent(parts["transfer"]).values()) == span.attributes["omnistage.output.hidden"] * formulas.WIDTH * 4


def _sent(transfer: CollectedSpan) -> dict[str, Any]:
    """Bytes by the way they went."""
    return {name: value for name, value in transfer.attributes.items() if name.startswith("omnistage.bytes.")}


def test_without_a_span_of_the_client_the_router_begins_a_trace(told: TracedChain) -> None:
    roots = [span for span in told.spans.of("omnistage-router", "generate") if not span.parent]
    assert len(roots) == 3 and len({root.trace_id for root in roots}) == 3
    for root in roots:
        assert {span.trace_id for span in chain(told.spans, root)} == {root.trace_id}


def test_what_the_client_does_not_record_nobody_records(told: TracedChain) -> None:
    """Six of eight requests are known, with all of their stages."""
    roots = told.spans.of("omnistage-router", "generate")
    assert len(roots) == 6
    recorded = {root.trace_id for root in roots}
    assert {span.trace_id for span in told.spans.spans} == recorded and UNRECORDED not in recorded
    chain(told.spans, told.root(TRACE))


def test_an_error_is_on_the_span_of_who_found_it_and_of_who_passed_it_on(told: TracedChain) -> None:
    spans, unknown, bad = told.spans, told.root(UNKNOWN), told.root(BAD)
    assert (unknown.error, unknown.attributes["error.type"], spans.below(unknown)) == ("UNKNOWN_MODEL", "UNKNOWN_MODEL", {})
    assert (bad.error, bad.attributes["omnistage.field"]) == ("BAD_REQUEST", "thinker.stop")
    (thinker,) = [span for span in spans.of("omnistage-thinker", "thinker") if span.trace_id == BAD]
    assert (thinker.parent, thinker.error) == (bad.id, "BAD_REQUEST")
    assert [spans.below(span)["open"].error for span in (bad, thinker)] == ["BAD_REQUEST"] * 2
    assert "tell nobody" not in repr(spans.spans)


async def test_waiting_for_a_place_is_a_span(tmp_path: Path) -> None:
    with (
        collector() as spans,
        traced(
            tmp_path,
            spans.url,
            kinds=["thinker"],
            pipeline=str(_text_pipeline(tmp_path)),
            options=SLOW,
            router_args=["--max-sessions", "1"],
        ) as running,
    ):
        async with omni_stub(running.address) as stub:
            first = stub.Generate(request("hello", 3), timeout=60)
            assert (await read(first)).HasField("started")
            second = stub.Generate(request("hello", 4), timeout=60, metadata=[*GIVEN, ("x-api-key", "other")])
            assert [event async for event in read_all(first)][-1].HasField("usage")
            assert [event async for event in read_all(second)][-1].HasField("usage")
    one, other = spans.of("omnistage-router", "generate")
    assert "queue" not in spans.below(one)
    queue, opened = (spans.below(other)[name] for name in ("queue", "open"))
    assert queue.begun_ns < queue.ended_ns <= opened.begun_ns and one.begun_ns < queue.begun_ns


@lengths.long_form(
    "system/test_tracing.py::test_a_request_is_one_tree_below_the_span_of_its_client",
    unkept="A launcher gives all of its servers the collector and the inline limit.",
)
async def test_a_stack_of_the_command_gives_its_servers_the_collector_and_the_inline_limit(tmp_path: Path) -> None:
    with collector() as spans:
        servers = ServerOptions(otlp=spans.url, settings={"inline_limit": 0})
        running = LaunchedStack(layout_of(Choice(["toy"], servers=servers)), log_folder=tmp_path)
        await running.start()
        try:
            async with omni_stub(running.address) as stub:
                await ask(stub, request("hello", 3))
        finally:
            await running.stop()
    _, thinker, *_ = chain(spans, spans.one("omnistage-router", "generate"))
    assert _sent(spans.below(thinker)["transfer"]).keys() == {"omnistage.bytes.shared_memory"}


# Losses ----------------------------------------------------------------------------------------------------------------------------------


@lengths.long_form(
    "system/test_storm.py::test_a_stage_is_killed",
    unkept="A loss is an event of the spans in which it was mended, and is named in the line of its answer.",
)
async def test_a_killed_stage_is_an_event_where_it_was_replaced(tmp_path: Path, seed: int) -> None:
    """The answer's line in the log names it too. The records of the killed process are gone with it."""
    killed: list[str] = []
    with collector() as spans:
        arguments = ["--otlp", spans.url]
        with fleet(
            tmp_path, replicas={"talker": 2}, options=SLOW, options_of=SLOWER_SOUND, stage_args=arguments, router_args=arguments
        ) as toys:
            async with omni_stub(toys.address("router")) as stub:
                asked = request("hello", seed, thinker={"max_tokens": 150, "ignore_eos": True})
                answer = await ask_through(stub, asked, kill_when(text_chunks(5), toys, "talker", killed))
        (line,) = lines(toys.server("router"), "answer.done")
        answer.check_toy(seed, "hello", 150)
        (other,) = [toys.address(name) for name in toys.of("talker") if toys.address(name) not in killed]
        code2wav = toys.address("code2wav-0")
    assert (line["failovers"], line["reason"]) == (1, "OK")
    assert line["replicas"] == {"thinker": [toys.address("thinker-0")], "talker": [*killed, other], "code2wav": [code2wav]}
    root = spans.one("omnistage-router", "generate")
    thinker, talker = spans.one("omnistage-thinker", "thinker"), spans.one("omnistage-talker", "talker")
    assert (thinker.parent, talker.parent) == (root.id, thinker.id)
    assert (talker.attributes["omnistage.replica"], talker.attributes["omnistage.resumed"]) == (other, True)
    for span in (root, thinker):
        event = span.event("failover")
        told = {name: event.attributes[f"omnistage.{name}"] for name in ("stage", "lost", "replica")}
        assert told == {"stage": "talker", "lost": killed[0], "replica": other}
        assert span.begun_ns <= event.at_ns <= span.ended_ns and event.attributes["omnistage.why"]
    assert talker.begun_ns <= thinker.event("failover").at_ns
    lost, resumed = spans.of("omnistage-code2wav", "code2wav")
    assert (resumed.parent, resumed.error) == (talker.id, "")
    assert lost.parent not in {span.id for span in spans.spans} and lost.trace_id == root.trace_id
    assert {span.trace_id for span in spans.spans} == {root.trace_id}


# Collectors that are of no use -----------------------------------------------------------------------------------------------------------


@lengths.long_form(
    "host/test_tracing.py::test_a_collector_that_does_not_answer_stops_nobody_and_fills_nothing",
    unkept="A process gives up its spans at its end, or finds no collector, and says so.",
)
@pytest.mark.parametrize("is_there", [True, False], ids=["never answers", "not there"])
async def test_a_collector_of_no_use_is_told_and_does_no_harm(tmp_path: Path, is_there: bool) -> None:
    """Processes answer, and end without an error and by themselves."""
    with collector(silent=True) as spans:
        url = spans.url if is_there else f"http://{take_address()}"
        with traced(tmp_path, url) as running:
            async with omni_stub(running.address) as stub:
                for _ in range(3):
                    (await ask(stub, request("hello", 3))).check_toy(3, "hello")
        assert spans.asked.is_set() is is_there and not spans.spans
    for server in running.processes():
        warnings = [line for line in map(json.loads, server.log().splitlines()) if line["level"] not in ("info", "debug")]
        assert [line for line in warnings if "exception" in line] == []
        if is_there:
            (line,) = lines(server, "tracing.cut")
            assert (line["level"], line["collector"]) == ("warning", url)
        else:
            assert [line for line in warnings if "traces" in line["event"] or line["event"] == "tracing.cut"]


# The cost of tracing that is off ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("otlp", [False, True])
async def test_a_server_imports_opentelemetry_where_spans_are_wanted_only(tmp_path: Path, otlp: bool) -> None:
    with collector() as spans:
        arguments = ["--otlp", spans.url] if otlp else []
        environment = {"PYTHONPROFILEIMPORTTIME": "1"}
        thinker = ServerProcess("omnistage.thinker", "--family", "toy", *arguments, log_folder=tmp_path, environment=environment)
        with thinker:
            thinker.wait_ready()
            flags = ["--pipeline", str(_text_pipeline(tmp_path)), "--stages", f"thinker={thinker.address}", *arguments]
            with ServerProcess("omnistage.router", *flags, log_folder=tmp_path, environment=environment) as router:
                router.wait_ready()
                async with omni_stub(router.address) as stub:
                    assert (await ask(stub, request("hello", 3))).text() == formulas.text(3, "hello", formulas.NATURAL_LENGTH)
        for server in (thinker, router):
            assert "grpc.aio" in server.log()
            assert ("opentelemetry" in server.log()) is otlp


def _text_pipeline(folder: Path) -> Path:
    path = folder / "words.yaml"
    stages, defaults = "[{kind: thinker, family: toy}]", "{thinker: {max_tokens: 99}}"
    path.write_text(f"name: words\ndescription: x\ninputs: [text]\noutputs: [text]\nstages: {stages}\ndefaults: {defaults}\n")
    return path
