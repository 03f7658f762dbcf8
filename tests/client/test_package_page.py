"""The page that an index shows of the package: its Python runs as it stands, and its commands are ones."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from omnistage.cli.main import app

PAGE = Path(__file__).resolve().parents[2] / "sdk" / "README.md"


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [text for named, text in found if named == language]


def test_its_python_runs(toy_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = blocks("python")
    monkeypatch.setenv("OMNISTAGE_ROUTER", toy_address)
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split()
    assert (tmp_path / "kite.wav").read_bytes()[:4] == b"RIFF"


def test_its_commands_are_commands_with_these_options() -> None:
    """None of them runs: the words alone are read."""
    root = get_command(app)
    lines = [shlex.split(line) for block in blocks("") for line in block.splitlines() if line.startswith("omnistage ")]
    assert {line[1] for line in lines} >= {"ask", "draw", "say", "chat", "serve", "stop", "status"}
    for _, name, *words in lines:
        command = root.commands[name]  # type: ignore[attr-defined]
        command.make_context(name, words)
