"""Every benchmark runs through: each `make bench-...` in its smallest size ends well, and has all of its figures."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import lengths

ROOT = Path(__file__).resolve().parents[2]

FIGURES = {
    "bench-default": ("default", 23),
    "bench-engine": ("engine", 5),
    "bench-pipeline": ("pipeline", 12),
    "bench-pipeline --family qwen3_omni": ("pipeline_qwen3", 12),
    "bench-code2wav": ("code2wav", 47),
    "bench-diffusion": ("diffusion", 9),
    "bench-gateway": ("gateway", 4),
    "bench-resilience": ("resilience", 28),
}
"""The file of each benchmark, and how many figures it has."""

pytestmark = [
    lengths.long_form("house/test_figures.py::test_a_smallest_run_does_less_and_has_no_goals", unkept="All parts of all benchmarks run."),
    pytest.mark.serial,
    pytest.mark.timeout(1800),
]


@pytest.mark.parametrize("benchmark", FIGURES)
def test_a_benchmark_runs_through_and_has_all_of_its_figures(tmp_path: Path, benchmark: str) -> None:
    target, _, options = benchmark.partition(" ")
    make = ["make", "--dry-run", target, f"BIN={Path(sys.executable).parent}", f"ARGS={options} --smallest --out {tmp_path}"]
    lines = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    (command,) = [line for line in lines if "-m benchmarks." in line]
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, "\n".join([line for line in done.stdout.splitlines() if line.startswith("failed:")] or [done.stderr])
    name, count = FIGURES[benchmark]
    values = {figure["figure"]: figure["value"] for figure in json.loads((tmp_path / f"{name}.json").read_text())["figures"]}
    assert len(values) == count, values
    assert all(map(math.isfinite, values.values())), values


def test_no_benchmark_is_left_out() -> None:
    targets = [line.partition(":")[0] for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("bench-")]
    assert {benchmark.partition(" ")[0] for benchmark in FIGURES} == set(targets)
