"""`make demo`: heard, kept, shown; its stack stays on a terminal, and its page opens on a desktop."""

from __future__ import annotations

import os
import pty
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

import numpy as np
import pytest
import soundfile

from helpers import lengths
from helpers.command import omnistage
from helpers.processes import ProcessFamily
from helpers.sink import Sink
from omnistage.cli.stack.served import Served, all_served, register_stack
from tools.demo import IDLE_LIMIT_S, find_serving, open_browser, silence_reason, tell

LIMIT_S = 100.0
ROOT = Path(__file__).resolve().parents[2]
DEMO = (sys.executable, str(ROOT / "tools" / "demo.py"), "toy")
ELSEWHERE = ("no terminal", "CI")


@pytest.fixture
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


@pytest.mark.usefixtures("alone")
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
            assert "The stack ends when nobody has asked it for 30 minutes, or by:" in shown
            assert shown.splitlines()[-2].endswith(f"omnistage stop {served.address}")
            with build_opener(ProxyHandler({})).open(f"http://{served.http}/ready", timeout=LIMIT_S) as ready:
                assert ready.status == 200
            assert (tmp_path / "demo.wav").stat().st_size > 44 and (tmp_path / "demo-timeline.png").exists()
            assert "starting the stack" not in on_terminal()
            assert all_served() == [served]
        finally:
            assert omnistage("stop").returncode == 0
    assert family.pids() == []


INTERRUPTED_IMPORT = """
import os, runpy, signal, sys

class Finder:
    def find_spec(self, name, *rest):
        if name == "omnistage.client":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def test_an_interrupt_while_it_begins_ends_it_without_a_word() -> None:
    words = (sys.executable, "-c", INTERRUPTED_IMPORT, str(ROOT / "tools" / "demo.py"))
    ended = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.usefixtures("alone")
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
    assert f"The stack {how_long}:   " in capsys.readouterr().err


@pytest.mark.usefixtures("alone")
@lengths.one_or_all("where", ELSEWHERE)
def test_elsewhere_nothing_is_left(family: ProcessFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, seed: int) -> None:
    if lengths.draw(where, ELSEWHERE, seed) == "CI":
        monkeypatch.setenv("CI", "true")
        assert "browser" not in on_terminal()
    else:
        done = subprocess.run(DEMO, capture_output=True, text=True, timeout=LIMIT_S, check=True)
        assert "browser" not in done.stdout + done.stderr
    assert (tmp_path / "demo.wav").exists() and all_served() == []
    assert family.wait_ended(LIMIT_S) == []


@pytest.mark.usefixtures("alone")
def test_it_is_heard_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, also by a player that dies."""
    for options in ((), ("--dies-after", "100")):
        sink = Sink(tmp_path / f"sink{len(options)}", *options, speed=0.0)
        monkeypatch.setenv("OMNISTAGE_PLAYER", sink.variable)
        done = subprocess.run(DEMO, capture_output=True, text=True, timeout=LIMIT_S, check=True)
        assert "open demo.wav" not in done.stderr
        samples, _ = soundfile.read(tmp_path / "demo.wav", dtype="float32")
        played = sink.samples()
        assert len(played) == len(samples) or options
        np.testing.assert_allclose(played, samples[: len(played)], rtol=0, atol=2**-15)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("player", "says"),
    [
        ("loud", "OMNISTAGE_PLAYER=loud: no player of that name is known: open demo.wav. Give none, sounddevice, "),
        ("nobody-has-this {rate}", "OMNISTAGE_PLAYER: there is no program nobody-has-this: open demo.wav. "),
        ("none", ""),
    ],
)
def test_who_cannot_hear_it_is_told_why(player: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNISTAGE_PLAYER", player)
    assert (silence_reason() or "").startswith(says) and bool(silence_reason()) == bool(says)
    monkeypatch.setenv("CI", "true")
    assert bool(silence_reason()) == bool(says), "whoever names a player in CI wants to hear of it"
    monkeypatch.delenv("OMNISTAGE_PLAYER")
    assert silence_reason() == ""


BROWSER = """#!/bin/sh
echo "noise of a browser" >&2; echo noise
ps -o tty= -p $$ > "$0.tty"
echo "$1" > "$0.url"
exec sleep "$(cat "$0.sleep")"
"""


OPEN = """
from tools import demo
demo.CONTAINER_FILES = ()
print(demo.open_browser("http://127.0.0.1:8000"))
"""


@pytest.mark.parametrize("sleep_s", ["0", "60"])
def test_the_page_opens_on_a_desktop(sleep_s: str, tmp_path: Path, family: ProcessFamily) -> None:
    """A browser that stays does not keep the demo, or its output, and its words are nobody's."""
    browser = tmp_path / "browser"
    browser.write_text(BROWSER)
    browser.chmod(0o755)
    Path(f"{browser}.sleep").write_text(sleep_s)
    variables = {name: value for name, value in os.environ.items() if name != "CI"} | {"DISPLAY": ":0", "BROWSER": f"{browser} %s"}
    done = subprocess.run([sys.executable, "-c", OPEN], capture_output=True, text=True, timeout=50, cwd=ROOT, env=variables)
    assert (done.stdout, done.stderr) == ("True\n", "")
    assert Path(f"{browser}.url").read_text() == "http://127.0.0.1:8000\n"
    assert Path(f"{browser}.tty").read_text().strip() == "?"


@pytest.mark.parametrize("variables", [{"DISPLAY": None}, {"CI": "true"}, {"BROWSER": "none"}, {"BROWSER": "/no/browser %s", "PATH": ""}])
def test_no_page_opens_elsewhere(variables: dict[str, str | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tools.demo.CONTAINER_FILES", ())
    for name, value in ({"CI": None, "WAYLAND_DISPLAY": None, "DISPLAY": ":0", "BROWSER": "true"} | variables).items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert not open_browser("http://127.0.0.1:8000")
    if variables == {"CI": "true"} and os.geteuid() == 0:
        monkeypatch.delenv("CI")
        monkeypatch.setattr("tools.demo.CONTAINER_FILES", (str(tmp_path),))
        assert not open_browser("http://127.0.0.1:8000")
