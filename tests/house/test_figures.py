"""The figures of the benchmarks: a measured figure stays, whatever fails after it, and the exit status reports a missed goal."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.figures import Figure, Report
from helpers.processes import StartedProcess

ROOT = Path(__file__).resolve().parents[2]


def read(report: Report) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(report.path.read_text(encoding="utf-8"))
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
    report = Report("some", tmp_path / "out")
    with report.part("first"):
        report.add(Figure("one", 1.0, "ms", "<= 2"))
        assert [figure["figure"] for figure in read(report)["figures"]] == ["one"]
        raise RuntimeError("no luck")
    with report.part("second"):
        report.add(Figure("two", 2.0, "ms"))
    assert report.finish() == 1
    assert [figure["figure"] for figure in read(report)["figures"]] == ["one", "two"]
    assert read(report)["failed"] == {"first": "RuntimeError: no luck"}
    assert "failed: first: RuntimeError: no luck" in capsys.readouterr().out
    assert [path.name for path in report.folder.iterdir()] == ["some.json"]


def test_an_interrupt_is_no_failed_part_and_leaves_the_figures(tmp_path: Path) -> None:
    report = Report("some", tmp_path)
    with pytest.raises(KeyboardInterrupt), report.part("first"):
        report.add(Figure("one", 1.0, "ms"))
        raise KeyboardInterrupt
    assert [figure["figure"] for figure in read(report)["figures"]] == ["one"]


def test_a_missed_goal_is_the_exit_status_unless_only_a_report_is_wanted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("some", tmp_path)
    report.add(Figure("good", 1.0, "ms", "<= 2"))
    assert report.finish() == 0
    report.add(Figure("late", 3.0, "ms", "<= 2"))
    assert report.finish() == 1
    assert report.finish(judge=False) == 0
    assert "goals missed: late" in capsys.readouterr().out
    assert [(figure["figure"], figure["missed"]) for figure in read(report)["figures"]] == [("good", False), ("late", True)]


def test_a_part_that_failed_is_told_by_the_exit_status_of_a_report_too(tmp_path: Path) -> None:
    report = Report("some", tmp_path)
    with report.part("first"):
        raise RuntimeError("no luck")
    assert report.finish(judge=False) == 1


WAITING = """
import signal, sys
from pathlib import Path
from benchmarks.figures import Figure, Report
report = Report("some", Path(sys.argv[1]))
report.add(Figure("one", 1.0, "ms"))
print("measured", flush=True)
signal.pause()
"""


def test_a_run_that_is_killed_leaves_what_it_measured(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WAITING, str(tmp_path)]
    with StartedProcess(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert any(line == "measured\n" for line in run.stdout)
        os.kill(run.pid, signal.SIGKILL)
    assert [figure["figure"] for figure in read(Report("some", tmp_path))["figures"]] == ["one"]


@pytest.mark.parametrize("module", ["benchmarks.default", "benchmarks.resilience"])
def test_every_benchmark_can_be_asked_for_a_report_only(module: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), *sys.path])}
    command = [sys.executable, "-m", module, "--help"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert "--report" in done.stdout
