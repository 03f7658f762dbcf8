"""The command as a person at a terminal sees it, through a real pseudo-terminal."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

from helpers.processes import ProcessFamily
from helpers.sink import Sink
from helpers.talking import Person
from helpers.terminal import CTRL_C, Terminal, words_of
from helpers.toy_pipeline import toy_pipeline
from omnistage.cli.make.screen import SPINNER
from omnistage.client import Omni, find_loudspeaker
from omnistage.models.toy import formulas


def test_the_answer_grows_above_a_line_that_shows_the_sound(toy_address: str) -> None:
    terminal = Terminal(200, 24)
    assert terminal.run(("ask", "Hi", "--seed", "1", "--address", toy_address)) == 0
    assert b"thinking" in terminal.written and b"speaking" in terminal.written
    *answer, figures = terminal.lines
    assert figures.startswith("ttft")
    assert words_of(answer) == formulas.text(1, "Hi", formulas.NATURAL_LENGTH).split()


def test_starting_a_stack_shows_each_process(family: ProcessFamily) -> None:
    terminal = Terminal()
    assert terminal.run(("ask", "Hi", "--pipeline", "toy", "--text-only")) == 0
    for name in (b"thinker", b"talker", b"code2wav", b"router"):
        assert name in terminal.written
    assert family.pids() == []


def test_ctrl_c_ends_the_call_and_its_stack(family: ProcessFamily, tmp_path: Path) -> None:
    terminal = Terminal()
    assert terminal.run(("ask", "Hi", "--pipeline", toy_pipeline(tmp_path), "--max-tokens", "32768"), Person(("router", CTRL_C))) == 130
    assert b"Traceback" not in terminal.written
    assert family.wait_ended() == []


def test_something_turns_until_the_first_word(tmp_path: Path) -> None:
    terminal = Terminal()
    assert terminal.run(("ask", "Hi", "--pipeline", toy_pipeline(tmp_path, interval_s=0.7, length=2))) == 0
    shown = terminal.written.decode()
    assert sum(f"{turning} thinking" in shown for turning in SPINNER) >= 3
    assert "thinking" not in " ".join(terminal.lines)


def test_an_answer_that_was_cut_says_so_and_what_to_do(toy_address: str) -> None:
    terminal = Terminal()
    assert terminal.run(("ask", "Hi", "--max-tokens", "7", "--address", toy_address)) == 0
    assert "cut at 7 tokens; --max-tokens N lets it say more" in " ".join(terminal.lines)
    whole = Terminal()
    assert whole.run(("ask", "Hi", "--address", toy_address)) == 0
    assert "cut at" not in " ".join(whole.lines)


def test_seeds_that_nobody_gave_are_short(toy_address: str) -> None:
    command = [sys.executable, "-m", "omnistage.cli", "ask", "Hi", "--json", "--address", toy_address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert 0 <= json.loads(done.stdout)["seed"] < 10**9


def test_the_sound_is_heard_while_it_is_made(toy_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sample once, in order, and the figures are there before all is heard."""
    sink = Sink(tmp_path / "sink")
    monkeypatch.setenv("OMNISTAGE_PLAYER", sink.variable)
    terminal = Terminal(200)
    assert terminal.run(("ask", "Hi", "--seed", "1", "--address", toy_address)) == 0
    with Omni(address=toy_address) as omni:
        audio = omni.generate("Hi", seed=1).audio
    assert audio is not None
    assert np.array_equal(sink.samples(), audio.samples)
    assert terminal.lines[-1].startswith("ttft")


@pytest.mark.parametrize("words", [("--no-play",), ("--text-only",), ("--json",), ("--out", "OUT.wav")])
def test_nothing_is_played_where_nobody_wants_to_hear(
    toy_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    sink = Sink(tmp_path / "sink")
    monkeypatch.setenv("OMNISTAGE_PLAYER", sink.variable)
    monkeypatch.chdir(tmp_path)
    terminal = Terminal()
    assert terminal.run(("ask", "Hi", "--address", toy_address, *words)) == 0
    assert not list((tmp_path / "sink").iterdir())


def test_ctrl_c_silences_what_is_still_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is complete, half a minute of it is to be heard; only listening to it ends."""
    sink = Sink(tmp_path / "sink")
    monkeypatch.setenv("OMNISTAGE_PLAYER", sink.variable)
    path = toy_pipeline(tmp_path, length=160, samples_per_frame=4800)
    terminal = Terminal(200)
    words = ("ask", "Hi", "--seed", "1", "--pipeline", path, "--out", str(tmp_path / "whole.wav"), "--play")
    assert terminal.run(words, Person(("playing, ", CTRL_C))) == 130
    assert b"ttft" in terminal.written
    whole, _ = soundfile.read(tmp_path / "whole.wav", dtype="float32")
    heard = sink.samples()
    assert len(heard) < len(whole) / 2 and np.array_equal(heard, whole[: len(heard)])


def test_without_a_loudspeaker_it_says_how_to_keep_the_sound(toy_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMNISTAGE_PLAYER")
    if find_loudspeaker() is not None:
        pytest.skip("something plays here")
    terminal = Terminal()
    assert terminal.run(("ask", "Hi", "--address", toy_address)) == 0
    assert "no loudspeaker here; --out F.wav keeps the sound" in " ".join(terminal.lines)


def test_figures_break_between_two_figures(toy_address: str) -> None:
    terminal = Terminal(48)
    assert terminal.run(("ask", "Hi", "--seed", "123456789", "--address", toy_address)) == 0
    figures = terminal.lines[next(number for number, line in enumerate(terminal.lines) if line.startswith("ttft")) :]
    assert len(figures) > 1 and "seed 123456789" in figures[-1]
    assert all(re.fullmatch(r"[a-z0-9]+ .*", line) and not line.endswith("·") for line in figures)
