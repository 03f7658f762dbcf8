"""pip finds versions for the client together with each of these packages. Nothing is installed; the test needs the index, and minutes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from helpers.lengths import LONG
from helpers.wheels import environment
from tools import wheels

OTHERS = ("pipecat-ai", "livekit-agents", "tritonclient[grpc]", "mlflow", "streamlit")
"""Packages that hold protobuf or grpcio to versions of their own."""


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    wheels.build(folder)
    return folder


def resolved(python: Path, dist: Path, *names: str) -> dict[str, str]:
    """The versions that pip chooses, by name."""
    report = dist / f"{names[-1]}.json"
    command = [str(python), "-m", "pip", "install", "--dry-run", "--quiet", "--only-binary=:all:", f"--report={report}"]
    done = subprocess.run([*command, f"--find-links={dist}", *names], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return {one["metadata"]["name"]: one["metadata"]["version"] for one in json.loads(report.read_text())["install"]}


@pytest.mark.parametrize("other", [pytest.param(one, marks=LONG) for one in OTHERS])
def test_they_are_had_in_the_version_that_they_have_alone(other: str, dist: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "venv") / "bin" / "python"
    name = other.partition("[")[0]
    alone, both = resolved(python, dist, other), resolved(python, dist, "omnistage", other)
    assert "omnistage" in both
    assert both[name] == alone[name], "an older one was taken, for the sake of the client"
