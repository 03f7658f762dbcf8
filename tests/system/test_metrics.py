"""The metrics that processes show to Prometheus: exactly those of docs/metrics.md, at each process and at the launcher of a stack."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from prometheus_client import Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from helpers import lengths
from helpers.ask import ask, request
from helpers.disturbed import SLOW, ask_through, audio_chunks, disturbed, kill_when
from helpers.engine_family import load_thinker
from helpers.fleet import fleet
from helpers.metrics import PROCESS, described, documented, fetched, value
from helpers.processes import StartedProcess
from helpers.servers import STAGES, family_logic, local_router, local_stage, omni_stub, toy_logic
from helpers.waiting import until
from omnistage.client import AsyncOmni
from omnistage.models.options import LoadOptions
from omnistage.router.pipeline import load_pipeline

SERVE = ("serve", "toy", "--replicas", "talker=2", "--address", "127.0.0.1:0", "--metrics", "127.0.0.1:0")

ALONE = """
name: alone
description: A Thinker on the engine, and nothing behind it.
inputs: [text]
outputs: [text]
stages:
  - kind: thinker
    family: test-engine
"""

UP = "omnistage_process_up"
PROCESSES = ("thinker", "talker-0", "talker-1", "code2wav", "router", "launcher")

ALL = {"all", "those with shared memory"}
TEXT, SOUND, PICTURES, SPEAKS = "those that make text", "those that make sound", "those that make pictures", "Talkers"
TENSORS, BATCHES, CACHE = "those that make tensors", "those that compute several in one step", "those with a KV cache"


class Launched:
    """A toy stack with two Talkers, and where it said that it and its metrics are."""

    def __init__(self, launcher: subprocess.Popen[str]) -> None:
        assert launcher.stderr is not None
        told: dict[str, list[str]] = {}
        while not {"serving", "metrics:"} <= told.keys():
            word, _, rest = launcher.stderr.readline().partition(" ")
            assert word, "the launcher ended"
            told[word] = rest.split()
        self.address = told["serving"][1]
        (url,) = told["metrics:"]
        self.metrics_address = url.removeprefix("http://").removesuffix("/metrics")

    def page(self) -> list[Metric]:
        return fetched(self.metrics_address)

    async def page_with(self, up: Mapping[str, bool]) -> list[Metric]:
        """As soon as these processes, and none but these, give their metrics, or do not; on a busy machine any may be late for a look."""
        pages: list[list[Metric]] = []

        def is_so() -> bool:
            pages.append(self.page())
            return {process: bool(value(pages[-1], UP, process=process)) for process in up} == dict(up)

        await until(is_so)
        return pages[-1]


@pytest.fixture(scope="module")
def stack() -> Iterator[Launched]:
    with StartedProcess([sys.executable, "-m", "omnistage.cli", *SERVE], stderr=subprocess.PIPE, text=True) as launcher:
        yield Launched(launcher)
        launcher.terminate()
        assert launcher.wait(60) == 0


async def talkers_of(stack: Launched) -> list[int]:
    """Process ids, in the order of their names."""
    async with AsyncOmni(address=stack.address) as omni:
        return [replica.pid for replica in await omni.replicas() if replica.stage == "talker"]


def of_process(page: list[Metric], process: str) -> list[Metric]:
    """The metrics of one process, from the page of its launcher."""
    found = []
    for family in page:
        own = Metric(family.name, family.documentation, family.type)
        own.samples = [sample for sample in family.samples if sample.labels[PROCESS] == process]
        if own.samples:
            found.append(own)
    return found


def said(*sections: str, who: set[str] | None = None) -> dict[str, object]:
    """The metrics in some sections of the document; in the section of the stages, those of the stages that are meant."""
    return {
        row.name: row.described
        for row in documented()
        if row.section in sections and (row.section != "Stages" or row.who in (who or set()))
    }


@lengths.long_form(
    "system/test_metrics.py::test_stages_that_have_more_show_what_the_page_says_of_them",
    "system/test_host.py::test_metrics_page_shows_every_family",
    "cli/test_status.py::test_families_of_all_processes_are_merged_and_every_sample_says_whose_it_is",
    unkept="A router and a launcher show no metric that the page does not describe.",
)
async def test_each_process_of_a_stack_shows_what_the_page_says_of_it_and_nothing_else(stack: Launched) -> None:
    async with AsyncOmni(address=stack.address) as omni:
        answer = await omni.generate("Hi")
    page = await stack.page_with(dict.fromkeys(PROCESSES, True))
    assert (
        described(page, without=[PROCESS]).keys()
        == said("Router", "Stages", "Every process", "Launcher", who={*ALL, TEXT, SOUND, TENSORS, SPEAKS}).keys()
    )
    stages = {"thinker": {*ALL, TEXT, TENSORS}, "talker-0": {*ALL, SPEAKS}, "talker-1": {*ALL, SPEAKS}, "code2wav": {*ALL, SOUND}}
    every = said("Every process")
    for process, who in stages.items():
        shown = described(of_process(page, process), without=[PROCESS])
        assert {name: shown[name] for name in shown.keys() - {UP}} == {**every, **said("Stages", who=who)}, process
    for process, expected in {"router": {**every, **said("Router")}, "launcher": every}.items():
        shown = described(of_process(page, process), without=[PROCESS])
        assert {name: shown[name] for name in shown.keys() - {UP}} == expected, process
    assert described(page)[UP] == said("Launcher")[UP]
    assert value(page, "omnistage_stage_tokens_total") >= 1
    assert value(page, "omnistage_stage_sound_seconds_total") == pytest.approx(answer.audio.duration_s if answer.audio else 0)
    assert value(page, "omnistage_router_requests_total", reason="OK") == 1


async def test_stages_that_have_more_show_what_the_page_says_of_them() -> None:
    """Those of a toy stack have neither a KV cache nor batches, and draw nothing."""
    on_engine = STAGES["thinker"](load_thinker(None, LoadOptions(None)))
    shown = {}
    async with AsyncExitStack() as stages:
        for name, logic in (("engine", on_engine), ("picture", toy_logic("diffusion")), ("film", family_logic("toy-film", "diffusion"))):
            local = await stages.enter_async_context(local_stage(logic))
            shown[name] = described(text_string_to_metric_families(generate_latest(local.registry).decode()))
    every = said("Every process")
    assert shown["engine"] == {**every, **said("Stages", who={"all", TEXT, TENSORS, BATCHES, CACHE})}
    assert shown["picture"] == {**every, **said("Stages", who={"all", PICTURES})}
    assert shown["film"].items() >= {**every, **said("Stages", who={"all", PICTURES, BATCHES})}.items()


def test_the_page_has_every_row_in_a_place_that_is_looked_at() -> None:
    rows = documented()
    assert {row.section for row in rows} == {"Router", "Stages", "Gateway", "Every process", "Launcher"}
    assert {row.who for row in rows if row.section == "Stages"} == {*ALL, TEXT, SOUND, PICTURES, SPEAKS, TENSORS, BATCHES, CACHE}
    assert len({row.name for row in rows}) == len(rows)


async def test_a_process_that_does_not_answer_is_left_out_and_told(stack: Launched) -> None:
    talkers = await talkers_of(stack)
    os.kill(talkers[0], signal.SIGSTOP)
    try:
        page = await stack.page_with({process: process != "talker-0" for process in PROCESSES})
    finally:
        os.kill(talkers[0], signal.SIGCONT)
    assert [family.name for family in of_process(page, "talker-0")] == [UP]
    assert value(page, "omnistage_stage_inflight", process="talker-1") == 0
    await stack.page_with(dict.fromkeys(PROCESSES, True))


async def test_a_process_that_was_started_again_is_found_at_its_new_address(stack: Launched) -> None:
    talkers = await talkers_of(stack)
    before = value(await stack.page_with({"talker-1": True}), "process_start_time_seconds", process="talker-1")
    os.kill(talkers[1], signal.SIGKILL)

    def is_new() -> bool:
        page = of_process(stack.page(), "talker-1")
        return len(page) > 1 and value(page, "process_start_time_seconds") > before

    await until(is_new)


async def test_tokens_and_batches_are_counted(tmp_path: Path) -> None:
    """On the engine, where several answers share steps."""
    alone = tmp_path / "alone.yaml"
    alone.write_text(ALONE)
    thinker = STAGES["thinker"](load_thinker(None, LoadOptions(None, family={"interval_s": 0.01})))
    async with (
        local_stage(thinker) as engine,
        local_router({"thinker": engine.address}, load_pipeline(str(alone))) as router,
        omni_stub(router.address) as stub,
    ):
        asked = [request("go", seed, thinker={"max_tokens": 30}, outputs=["text"]) for seed in range(4)]
        answers = await asyncio.gather(*[ask(stub, one) for one in asked])
        page = list(engine.registry.collect())
        assert value(page, "omnistage_stage_tokens_total") == sum(len(answer.tokens()) for answer in answers)
        steps, stepped = value(page, "omnistage_stage_batch_size_count"), value(page, "omnistage_stage_batch_size_sum")
        assert 0 < steps < stepped <= 4 * steps


async def test_lost_replicas_are_counted_at_the_router(tmp_path: Path) -> None:
    with fleet(tmp_path, replicas={"talker": 2}, options=SLOW) as running:
        async with disturbed(running) as stub:
            asked = request("hello", 3, thinker={"max_tokens": 150, "ignore_eos": True})
            answer = await ask_through(stub, asked, kill_when(audio_chunks(2), running, "talker"))
            assert answer.failovers
            address = running.server("router").metrics_address
            page = await asyncio.to_thread(fetched, address)
            assert value(page, "omnistage_router_failovers_total", stage="talker") == len(answer.failovers)
            assert value(page, "omnistage_router_failovers_total", stage="thinker") == 0
            await until(lambda: value(fetched(address), "omnistage_router_replicas", stage="talker", state="lost") == 1)
            page = await asyncio.to_thread(fetched, address)
            assert value(page, "omnistage_router_replicas", stage="talker", state="serving") == 1
