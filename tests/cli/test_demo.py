"""`make demo`: it leaves a stack with a page on a terminal, and nothing anywhere else."""

from __future__ import annotations

import os
import pty
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

import pytest

from helpers import lengths
from helpers.command import omnistage
from helpers.processes import ProcessFamily
from omnistage.cli.stack.served import Served, all_served, register_stack
from tools.demo import IDLE_LIMIT_S, find_serving, tell

ROOT = Path(__file__).resolve().parents[2]
DEMO = (sys.executable, str(ROOT / "tools" / "demo.py"), "toy")
LIMIT_S = 100.0
ELSEWHERE = ("no terminal", "CI")


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: ProcessFamily) -> None:
    """Stacks of this test, at ports of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMNISTAGE_STATE", str(tmp_path / "state"))
    for name, value in (("ADDRESS", "127.0.0.1:0"), ("HTTP", "127.0.0.1:0"), ("NO_HTTP", "false")):
        monkeypatch.setenv(f"OMNISTAGE_SERVE_{name}", value)
    monkeypatch.delenv("CI", raising=False)


def on_terminal() -> str:
    """The output of the demo on a terminal, to its end."""
    master, slave = pty.openpty()
    shown = b""
    with subprocess.Popen(DEMO, stdin=slave, stdout=slave, stderr=slave) as demo:
        os.close(slave)
        with suppress(OSError):  # Linux says EIO when the last writer is gone
            while piece := os.read(master, 65536):
                shown += piece
        assert demo.wait(LIMIT_S) == 0, shown.decode()
    os.close(master)
    return shown.decode()


@lengths.long_form(
    "cli/test_demo.py::test_only_a_stack_that_serves_the_same_is_used_again",
    "cli/test_demo.py::test_elsewhere_nothing_is_left",
    unkept="on a terminal the stack stays, whoever has the usual port",
)
def test_on_a_terminal_its_stack_stays_and_is_used_again(family: ProcessFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside whatever has the usual port."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        usual = f"127.0.0.1:{other.getsockname()[1]}"
        monkeypatch.setenv("OMNISTAGE_SERVE_ADDRESS", usual)
        shown = on_terminal()
        (served,) = all_served()
        try:
            assert f"Something else listens at {usual}: " in shown
            assert f"Go on in a browser: http://{served.http} " in shown
            assert "it ends by itself when nobody has asked for 1800 s" in shown
            last = shown.splitlines()[-1]
            assert last.startswith("The stack ends when nobody has asked it for 30 minutes, or by: ")
            assert last.endswith(f"omnistage stop {served.address}")
            with build_opener(ProxyHandler({})).open(f"http://{served.http}/ready", timeout=LIMIT_S) as ready:
                assert ready.status == 200
            assert (tmp_path / "demo.wav").stat().st_size > 44 and (tmp_path / "demo-timeline.png").exists()
            assert "starting the stack" not in on_terminal()
            assert all_served() == [served]
        finally:
            assert omnistage("stop").returncode == 0
    assert family.pids() == []


@pytest.mark.parametrize(
    ("change", "is_used"),
    [
        ({}, True),
        ({"pipeline": "toy"}, False),
        ({"pipeline": "smol, picture, toy"}, False),
        ({"http": ""}, False),
        ({"http": "127.0.0.1:1"}, False),
        ({"address": "127.0.0.1:2"}, False),
        ({"address": "127.0.0.1:2", "idle_limit_s": float(IDLE_LIMIT_S)}, True),
    ],
)
def test_only_a_stack_that_serves_the_same_is_used_again(change: dict[str, Any], is_used: bool, capsys: pytest.CaptureFixture[str]) -> None:
    usual = "127.0.0.1:1"
    with socket.create_server(("127.0.0.1", 0)) as gateway:
        http = f"127.0.0.1:{gateway.getsockname()[1]}"
        there = replace(Served(usual, os.getpid(), "smol, picture", "", 5.0, http), **change)
        with register_stack(there):
            assert find_serving(usual, []) == (there if is_used else None)
        tell(there)
    how_long = "ends when nobody has asked it for 30 minutes, or by" if there.idle_limit_s else "stays until you end it"
    assert f"The stack {how_long}: " in capsys.readouterr().out


@lengths.one_or_all("where", ELSEWHERE)
def test_elsewhere_nothing_is_left(family: ProcessFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, seed: int) -> None:
    if lengths.draw(where, ELSEWHERE, seed) == "CI":
        monkeypatch.setenv("CI", "true")
        assert "browser" not in on_terminal()
    else:
        done = subprocess.run(DEMO, capture_output=True, text=True, timeout=LIMIT_S, check=True)
        assert "browser" not in done.stdout
    assert (tmp_path / "demo.wav").exists() and all_served() == []
    assert family.wait_ended(LIMIT_S) == []
