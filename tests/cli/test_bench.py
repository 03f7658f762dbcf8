"""`omnistage bench` against real toy stacks: figures, errors by reason, files, what a terminal shows, and Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import aclosing, suppress
from dataclasses import asdict
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from helpers import lengths, servers
from helpers.command import omnistage
from helpers.output import object_of, refusal
from helpers.terminal import CTRL_C, Terminal, terminal_after
from helpers.toy_pipeline import toy_pipeline
from helpers.waiting import until
from omnistage.cli.bench.level import Closed, Level, measure_answer
from omnistage.cli.bench.prompts import QUESTIONS, Questions
from omnistage.cli.bench.results import BenchScreen, Distribution, Summary
from omnistage.cli.bench.run import BenchRun
from omnistage.cli.main import app
from omnistage.cli.report import Interrupted
from omnistage.cli.targets import where_of
from omnistage.client import AsyncOmni, Omni
from omnistage.client.events import TextDelta
from omnistage.client.options import Options

ROOT = Path(__file__).resolve().parents[2]

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


ENDLESS: Options = {"max_tokens": 2000, "min_tokens": 2000, "ignore_eos": True, "timeout_s": 110.0}

PAGE = (ROOT / "docs" / "bench.md").read_text()

FIGURES = {name for cell in re.findall(r"^\| (`[^|]*)\|", PAGE, re.MULTILINE) for name in re.findall(r"`(\w+)`", cell)}
"""All that the tables of the page explain."""

KEYS = re.findall(r"`(\w+)`", PAGE.partition("says what was measured")[2].partition(")")[0])
"""The keys of the object of a run, without its levels, as the page tells."""


def bench(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return omnistage("bench", *words)


def measured(*words: str | Path) -> dict[str, Any]:
    """The object of a run that goes well."""
    done = bench(*words, "--json")
    assert done.stderr == ""
    return object_of(done)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["-c", "1,x"], "--concurrency 1,x: give numbers with commas between, such as 1,4,16"),
        (["-c", "2.5"], "--concurrency 2.5: give whole numbers"),
        (["-c", "0"], "--concurrency 0: give numbers above 0, at most 4096"),
        (["-r", "nan"], "--rate nan: give numbers above 0"),
        (["-c", "1", "-r", "1"], "--concurrency and --rate are two kinds of load"),
        (["--arrivals", "constant"], "--arrivals is for requests that come by themselves; say how many in a second with --rate"),
        (["--max-open", "3"], "--max-open is for requests that come by themselves"),
        (["-r", "1", "--arrivals", "burst"], "--arrivals burst and --burst-size N go together"),
        (["-r", "1", "--burst-size", "4"], "--arrivals burst and --burst-size N go together"),
        (["--seconds", "inf"], "'--seconds': is 'inf'; it must be a number"),
        (["--slo", "speed=1"], "--slo speed=1: 'speed=1' is no limit; give NAME=LIMIT"),
        (["--slo", "ttft=0"], "--slo ttft=0: give a number of seconds above 0"),
        (["--slo", "rtf=1,rtf=2"], "rtf is there twice"),
        (["--say", "--draw"], "--say, --draw and --text-only exclude each other"),
        (["--say", "--max-tokens", "3"], "--max-tokens and --output-tokens are of answers"),
        (["--max-tokens", "3", "--output-tokens", "3"], "--output-tokens says how long each answer is"),
        (["--output-tokens", "9-3"], "--output-tokens 9-3: give a number from 1 to 32768, or two such as 100-900"),
        (["--input-words", "0"], "--input-words 0: give a number from 1 to 100000"),
        (["--input-words", "3", "--prompts", "f"], "--prompts and --input-words both say what is asked"),
        (["--text-only", "--voice", "toy"], "--voice and --profile are those of sound"),
        (["--steps", "3"], "--steps, --width and --height are of pictures; add --draw"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_command_line(words: list[str], told: str) -> None:
    result = CliRunner().invoke(app, ["bench", *words], terminal_width=200)
    assert result.exit_code == 2 and told in " ".join(result.output.replace("│", " ").split())


# Against a router


@pytest.fixture(scope="module")
def slow_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """HOST:PORT of a router that takes one answer at a time, of many seconds."""
    folder = tmp_path_factory.mktemp("slow")
    with servers.toy_address(folder, toy_pipeline(folder, interval_s=0.05), "--max-sessions", "1") as address:
        yield address


def test_counts_and_figures_are_those_of_the_answers(toy_address: str, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    words = ("--address", toy_address, "-c", "1,3", "-n", "6", "--warmup", "1", "--seed", "40", "--slo", "e2e=1000", "--out", out)
    told = measured(*words)
    assert told == json.loads(out.read_text())
    assert set(told) == {*KEYS, "levels"}
    assert (told["task"], told["seed"], told["interrupted"], told["slo"]) == ("ask", 40, False, {"e2e": 1000.0})
    assert [stage["stage"] for stage in told["stages"]] == ["thinker", "talker", "code2wav"]
    first, second = told["levels"]
    loads = [{"loop": "closed", "concurrency": number, "requests": 6, "seconds": None} for number in (1, 3)]
    assert [level["load"] for level in told["levels"]] == loads
    with Omni(address=toy_address) as omni:
        for level, begin in ((first, 1), (second, 8)):  # Behind its warm-up.
            assert {*level, *level["figures"]} == FIGURES | {"load", "figures", "requests", "completed", "failed"}
            assert (level["offered"], level["completed"], level["failed"], level["interrupted"], level["not_started"]) == (6, 6, 0, 0, 0)
            assert [request["number"] for request in level["requests"]] == list(range(begin, begin + 6))
            answers = [omni.generate(QUESTIONS[number], seed=40 + number) for number in range(begin, begin + 6)]
            assert [request["tokens"] for request in level["requests"]] == [len(answer.token_ids) for answer in answers]
            assert level["tokens"] == sum(len(answer.token_ids) for answer in answers) > 0
            assert level["audio_s"] == pytest.approx(sum(answer.timing.audio_s for answer in answers), abs=1e-5)
            assert level["audio_s"] > 0
            for rate, amount in (("request", 6), ("token", level["tokens"]), ("audio", level["audio_s"])):
                assert level[f"{rate}_throughput"] * level["wall_s"] == pytest.approx(amount, rel=1e-3)
            assert level["request_goodput"] == level["request_throughput"]
            check_figures(level)


def check_figures(level: dict[str, Any]) -> None:
    """Each of them is that of its requests, and what has to come before something else did."""
    requests, figures = level["requests"], level["figures"]
    for name in figures.keys() - {"itl_s", "late_s"}:
        values = [request[name] for request in requests if request[name] is not None]
        assert figures[name] == pytest.approx(asdict(Distribution.of(values)), abs=2e-6)
    assert figures["itl_s"]["count"] == sum(request["itl_count"] for request in requests)
    for request in requests:
        assert 0 < request["ttft_s"] <= request["e2e_s"] <= request["ended_s"] - request["begun_s"] + 1e-5
        assert request["ttft_s"] < request["audio_ttfp_s"] <= request["ttfa_s"] <= request["rtf"] * request["audio_s"] + 1e-5
        assert request["starved_s"] <= request["underrun_s"] + 1e-5


def test_text_alone_has_no_figures_of_sound_and_its_length(toy_address: str) -> None:
    words = ("--address", toy_address, "--text-only", "--input-words", "3-4", "--output-tokens", "30-40", "-c", "2", "-n", "5")
    (level,) = measured(*words, "--warmup", "0")["levels"]
    assert set(level["figures"]) <= {"ttft_s", "tpot_s", "itl_s", "e2e_s", "queued_s", "tokens", "late_s"}
    assert level["continuous"] is None and level["audio_s"] == 0
    assert all(30 <= request["tokens"] <= 40 and request["finish_reason"] == "length" for request in level["requests"])


def test_texts_are_spoken(toy_address: str, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("one two three\nfour five\n")
    words = ("--address", toy_address, "--say", "--prompts", tmp_path / "texts.txt", "--rate", "20", "--arrivals", "constant", "-n", "4")
    told = measured(*words, "--warmup", "0")
    (level,) = told["levels"]
    assert (told["task"], told["prompts"]) == ("say", "2 prompts of texts.txt")
    limits = {"requests": 4, "seconds": None}
    assert level["load"] == {"loop": "open", "arrivals": "constant", "rate": 20.0, "max_open": 256, **limits}
    assert [request["due_s"] for request in level["requests"]] == [0.0, 0.05, 0.1, 0.15]
    assert all(request["begun_s"] >= request["due_s"] for request in level["requests"])
    with Omni(address=toy_address) as omni:
        lengths = [omni.say(text).timing.audio_s for text in ("one two three", "four five")]
    assert [request["audio_s"] for request in level["requests"]] == [pytest.approx(length) for length in lengths * 2]


@lengths.long_form("cli/test_bench.py::test_counts_and_figures_are_those_of_the_answers", unkept="drawings have figures of their own")
def test_pictures_are_drawn() -> None:
    with Omni(pipeline="toy-film") as omni:
        words = ("--address", omni.address, "--draw", "--steps", "5", "--width", "16", "--height", "16", "-c", "1,2", "-n", "3")
        told = measured(*words)
    assert [(level["completed"], level["steps"], level["pictures"]) for level in told["levels"]] == [(3, 15, 3)] * 2
    assert set(told["levels"][0]["figures"]) == {"e2e_s", "queued_s", "late_s"}


async def test_what_has_no_room_is_counted_by_its_reason(slow_address: str) -> None:
    """The only place is taken for as long as it lasts."""
    words = ("--address", slow_address, "--rate", "200", "--arrivals", "burst", "--burst-size", "4", "-n", "8", "--json")
    async with AsyncOmni(address=slow_address) as omni, aclosing(omni.stream("wait", **ENDLESS)) as events:
        assert isinstance(await anext(events), TextDelta)
        done = await asyncio.to_thread(bench, *words)
    assert done.returncode == 1, "nothing was measured"
    (level,) = json.loads(done.stdout)["levels"]
    assert (level["offered"], level["completed"], level["failed"], level["not_started"]) == (8, 0, 8, 0)
    assert [(error["error"], error["reason"], error["count"]) for error in level["errors"]] == [("OverloadedError", "OVERLOADED", 8)]
    assert {request["outcome"] for request in level["requests"]} == {"failed"} and set(level["figures"]) == {"late_s"}
    assert level["request_throughput"] == 0


def test_a_time_limit_is_one_more_reason(slow_address: str) -> None:
    words = ("--address", slow_address, "-c", "1", "-n", "2", "--output-tokens", "2000", "--timeout", "0.5", "--warmup", "0", "--json")
    done = bench(*words)
    (level,) = json.loads(done.stdout)["levels"]
    assert done.returncode == 1 and level["failed"] == 2
    assert "DeadlineError" in {error["error"] for error in level["errors"]}


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (["--pipeline", "none"], "--pipeline none: this router has no such pipeline", "It has toy (toy-thinker)."),
        (["--voice", "nobody"], "--voice: ", ""),
        (["--draw"], "toy does not draw; no other pipeline of this router does; serve a checkpoint that does, such as Qwen-Image", ""),
        (["--out", "x.txt"], "--out x.txt: only JSON can be written", "Give a name that ends in .json."),
        (["--out", "none/x.json"], "--out none/x.json: its folder does not exist", "mkdir"),
        (["--prompts", "none.txt"], "--prompts none.txt: cannot be read: No such file", ""),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_cannot_be_measured_is_one_line(toy_address: str, tmp_path: Path, words: list[str], error: str, hint: str) -> None:
    told, *advice = refusal("bench", "--address", toy_address, *words, "--json", folder=tmp_path)
    assert told.startswith("error: ") and error in told
    assert [line.startswith("hint: ") and hint in line for line in advice] == ([True] if hint else [])
    assert list(tmp_path.iterdir()) == []


def test_without_a_router_nothing_is_started() -> None:
    assert "--address HOST:PORT" in "\n".join(refusal("bench", "-n", "1"))


# On a terminal


def visible(terminal: Terminal) -> list[str]:
    """All lines that were ever printed, without what only moves or colours."""
    return [line.split("\r")[-1] for line in ESCAPES.sub("", terminal.written.decode()).replace("\r\n", "\n").split("\n")]


def test_the_tables_fit_into_80_columns(toy_address: str) -> None:
    words = ("bench", "--address", toy_address, "--pipeline", "toy", "-c", "1,16", "-n", "20", "--slo", "ttft=10,ttfa=10,rtf=100")
    terminal = terminal_after(*words, size=(80, 100))
    assert max(map(len, visible(terminal))) <= 80
    lines = terminal.lines
    assert not [line for line in lines if "…" in line] and "20 of 20 completed in" in " ".join(lines)
    names = {"ttft ms", "tpot ms", "itl ms", "e2e ms", "audio_ttfp ms", "ttfa ms", "rtf", "rtf generation", "underrun ms", "starved ms"}
    assert names <= {re.split(r"  +", line)[0] for line in lines}
    header, *rows = lines[-3:]
    assert header.split()[0] == "load" and header.split()[-1] == "goodput"
    assert [row.split()[0] for row in rows] == ["1", "16"]


def test_ctrl_c_ends_early_and_tells_what_was_measured(toy_address: str, tmp_path: Path) -> None:
    terminal, pressed = Terminal(100, 60), list[bool]()

    def press(terminal: Terminal) -> None:
        if not pressed and re.search(rb"[1-9]\d* done", terminal.written):
            pressed.append(True)
            terminal.press(CTRL_C)

    out = tmp_path / "figures.json"
    words = ("bench", "--address", toy_address, "-c", "2,4", "-n", "100000", "--out", str(out))
    assert terminal.run(words, press) == 130
    told = json.loads(out.read_text())
    (level,) = told["levels"]
    assert told["interrupted"] is True
    assert level["completed"] >= 1 and level["interrupted"] <= 2 < level["offered"]
    assert level["offered"] == level["completed"] + level["failed"] + level["interrupted"]
    assert f"{level['completed']} of {level['offered']} completed in" in " ".join(terminal.lines)
    assert terminal.lines[-1] == "interrupted: this is what was measured by then"
    assert list(tmp_path.iterdir()) == [out]


class Stubborn(BenchRun):
    """Goes on after the first signal."""

    measures = False

    async def _measure(self, omni: AsyncOmni, screen: BenchScreen) -> None:
        self.levels.append(Summary(Level(Closed(1), partial(measure_answer, omni, self.questions), count()), None))
        for self.measures in (True, False):
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        raise asyncio.CancelledError


async def test_a_second_signal_ends_at_once(toy_address: str) -> None:
    bench = Stubborn(where_of(toy_address, None), Questions("ask", {}), [], 0, 1.0, None, is_quiet=True)
    working = asyncio.create_task(bench.run(verbose=False))
    await until(lambda: bench.measures)
    os.kill(os.getpid(), signal.SIGTERM)
    await until(lambda: not bench.measures)
    assert not working.done()
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(Interrupted, match=f"by signal {signal.SIGTERM}"):
        await working
    for handled in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().remove_signal_handler(handled)
    signal.signal(signal.SIGINT, signal.default_int_handler)
