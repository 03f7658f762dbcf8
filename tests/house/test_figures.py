"""The frame of the benchmarks: a measured figure stays, whatever fails after it, and the exit status reports a missed goal. Ways are gone
in turn. Every benchmark has its target of make, and a page that quotes it."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.figures import Benchmark, Figure, arguments, ratio, run
from helpers.processes import StartedProcess

ROOT = Path(__file__).resolve().parents[2]


def read(benchmark: Benchmark) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(benchmark.path.read_text(encoding="utf-8"))
    return told


@pytest.mark.parametrize(
    ("goal", "value", "missed"),
    [
        ("<= 1.5", 1.5, False),
        ("<= 1.5", 1.51, True),
        (">= 4.5", 4.5, False),
        (">= 4.5", 4.4, True),
        ("<= 0", 0.0, False),
        ("<= 300", math.nan, True),
        ("<= 300", math.inf, True),
        ("", 1e9, False),
    ],
)
def test_a_goal_is_met_or_missed(goal: str, value: float, missed: bool) -> None:
    assert Figure("one", value, "ms", goal).missed == missed


@pytest.mark.parametrize("goal", ["p50 <= 300", "0", "< 3", "<= 3 ms"])
def test_a_goal_that_nothing_can_be_held_against_is_refused(goal: str) -> None:
    with pytest.raises(ValueError, match="a goal is"):
        Figure("one", 1.0, "ms", goal)


def test_what_was_measured_stays_when_a_later_part_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    benchmark = Benchmark("some", tmp_path / "out")
    with benchmark.part("first"):
        benchmark.add(Figure("one", 1.0, "ms", "<= 2"))
        assert [figure["figure"] for figure in read(benchmark)["figures"]] == ["one"]
        raise RuntimeError("no luck")
    with benchmark.part("second"):
        benchmark.add(Figure("two", 2.0, "ms"))
    assert benchmark.finish() == 1
    assert [figure["figure"] for figure in read(benchmark)["figures"]] == ["one", "two"]
    assert read(benchmark)["failed"] == {"first": "RuntimeError: no luck"}
    assert "failed: first: RuntimeError: no luck" in capsys.readouterr().out
    assert [path.name for path in benchmark.out.iterdir()] == ["some.json"]


def test_an_interrupt_is_no_failed_part_and_leaves_the_figures(tmp_path: Path) -> None:
    benchmark = Benchmark("some", tmp_path)
    with pytest.raises(KeyboardInterrupt), benchmark.part("first"):
        benchmark.add(Figure("one", 1.0, "ms"))
        raise KeyboardInterrupt
    assert [figure["figure"] for figure in read(benchmark)["figures"]] == ["one"]


def test_a_missed_goal_is_the_exit_status_unless_only_a_report_is_wanted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    benchmark = Benchmark("some", tmp_path)
    benchmark.add(Figure("good", 1.0, "ms", "<= 2"))
    assert benchmark.finish() == 0
    benchmark.add(Figure("late", 3.0, "ms", "<= 2"))
    assert benchmark.finish() == 1
    assert benchmark.finish(judge=False) == 0
    assert "goals missed: late" in capsys.readouterr().out
    assert [(figure["figure"], figure["missed"]) for figure in read(benchmark)["figures"]] == [("good", False), ("late", True)]


def test_a_part_that_failed_is_told_by_the_exit_status_of_a_report_too(tmp_path: Path) -> None:
    benchmark = Benchmark("some", tmp_path)
    with benchmark.part("first"):
        raise RuntimeError("no luck")
    assert benchmark.finish(judge=False) == 1


WAITING = """
import signal, sys
from pathlib import Path
from benchmarks.figures import Benchmark, Figure
benchmark = Benchmark("some", Path(sys.argv[1]))
benchmark.add(Figure("one", 1.0, "ms"))
print("measured", flush=True)
signal.pause()
"""


def test_a_run_that_is_killed_leaves_what_it_measured(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WAITING, str(tmp_path)]
    with StartedProcess(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert any(line == "measured\n" for line in run.stdout)
        os.kill(run.pid, signal.SIGKILL)
    assert [figure["figure"] for figure in read(Benchmark("some", tmp_path))["figures"]] == ["one"]


async def test_ways_are_gone_in_turn_and_the_first_rounds_warm_up(tmp_path: Path) -> None:
    calls = list[tuple[str, int]]()

    def way(name: str) -> Callable[[int], Awaitable[tuple[str, int]]]:
        async def go(number: int) -> tuple[str, int]:
            calls.append((name, number))
            return name, number

        return go

    ours, theirs = await Benchmark("some", tmp_path).by_turns(3, way("ours"), way("theirs"), warm_ups=1)
    assert calls == [(name, n) for n in range(4) for name in (("theirs", "ours") if n % 2 else ("ours", "theirs"))]
    assert ours == [("ours", 1), ("ours", 2), ("ours", 3)]
    assert theirs == [("theirs", 1), ("theirs", 2), ("theirs", 3)]
    assert await Benchmark("some", tmp_path, is_smallest=True).by_turns(3, way("ours")) == [[("ours", 0)]]


def test_a_ratio_compares_the_same_rounds() -> None:
    assert ratio([2.0, 30.0, 5.0], [1.0, 10.0, 5.0]) == 2.0


async def measure(benchmark: Benchmark) -> None:
    assert benchmark.folder.is_dir()
    benchmark.add(Figure("late", benchmark.size(100, 3), "ms", "<= 2"))


@pytest.mark.parametrize(("flags", "status", "value"), [([], 1, 100), (["--report"], 0, 100), (["--smallest"], 0, 3)])
def test_a_smallest_run_does_less_and_has_no_goals(tmp_path: Path, flags: list[str], status: int, value: float) -> None:
    options = arguments(None).parse_args([*flags, "--out", str(tmp_path)])
    assert run("some", options, {"part": measure}) == status
    assert [figure["value"] for figure in read(Benchmark("some", tmp_path))["figures"]] == [value]


def test_an_unknown_part_is_refused_with_the_names_of_all(tmp_path: Path) -> None:
    options = arguments(None).parse_args(["--only", "other", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="no part is called other; the parts are: one, two"):
        run("some", options, {"one": measure, "two": measure})
    assert not [*tmp_path.iterdir()]


def test_every_benchmark_has_a_target_and_a_page_that_quotes_it() -> None:
    """The list of commands in development.md is no page that quotes."""
    targets = re.findall(r"^(bench-\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md") if path.name != "development.md"]
    assert {target for page in pages for target in re.findall(r"make (bench-\w+)", page)} == set(targets)
