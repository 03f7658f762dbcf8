"""The unit for systemd starts a command that the command line takes."""

from __future__ import annotations

import configparser
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.command import omnistage

UNIT = Path(__file__).resolve().parents[2] / "deploy" / "systemd" / "omnistage.service"


def command() -> list[str]:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # Names of systemd have capital letters.
    unit.read(UNIT, encoding="utf-8")
    return shlex.split(unit["Service"]["ExecStart"])


def test_the_command_of_the_unit_is_taken() -> None:
    program, *words = command()
    assert Path(program).name == "omnistage"
    done = omnistage(*words, "--print-config")
    assert (done.returncode, done.stderr) == (0, "") and "# command line" in done.stdout


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """Its program and its user are of another machine."""
    text = UNIT.read_text(encoding="utf-8").replace(command()[0], sys.executable).replace("User=omnistage", "User=root")
    (tmp_path / UNIT.name).write_text(text)
    done = subprocess.run(["systemd-analyze", "verify", tmp_path / UNIT.name], capture_output=True, text=True, timeout=60, check=False)
    if "Failed to create /" in done.stderr or "Failed to initialize manager" in done.stderr:
        pytest.skip("systemd cannot check units in this container")
    assert (done.returncode, done.stderr) == (0, "")
