"""The command as a person at a terminal sees it, through a real pseudo-terminal, and the lines that stay of a long answer."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import soundfile

from helpers import lengths
from helpers.processes import ProcessFamily
from helpers.servers import stack
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


# The lines that stay


FIGURES = re.compile(r"^ttft \d+ ms")


def numbered(characters: int) -> str:
    """So many characters of words that come once each; few enough words for the toy model, and none too long for 20 columns."""
    words: list[str] = []
    while sum(len(word) + 1 for word in words) < characters:
        number = len(words)
        words.append(f"{('volcano-', 'mountain-top-', 'underground-')[number % 3]}{number:03x}")
    return " ".join(words)[:characters]


@contextmanager
def file_with(text: str) -> Iterator[int]:
    with tempfile.TemporaryFile() as file:
        file.write(text.encode())
        file.seek(0)
        yield file.fileno()


def say(terminal: Terminal, text: str, address: str, meanwhile: Callable[[Terminal], None] | None = None) -> tuple[list[str], list[str]]:
    """Speak a text on a terminal: the lines of the answer, and those of the figures behind it."""
    with file_with(text) as stdin:
        code = terminal.run(("say", "-", "--seed", "1", "--address", address), meanwhile, stdin)
    lines = terminal.lines
    figures = [number for number, line in enumerate(lines) if FIGURES.match(line)]
    assert (code, len(figures)) == (0, 1), lines[-5:]
    return lines[: figures[0]], lines[figures[0] :]


@lengths.drawn_cells(2, ("columns", "rows"), [(80, 24), (40, 10), (20, 5), (200, 60)])
def test_a_long_text_leaves_its_own_lines_and_no_more(toy_address: str, columns: int, rows: int) -> None:
    text = numbered(3280)
    terminal = Terminal(columns, rows)
    answer, figures = say(terminal, text, toy_address)
    assert answer == textwrap.wrap(text, columns - 1, break_on_hyphens=False)
    assert len("".join(figures)) < 120 and b"speaking" in terminal.written


def test_an_answer_of_a_model_leaves_its_own_lines_and_no_more(toy_address: str) -> None:
    terminal = Terminal(40, 10)
    assert terminal.run(("ask", "Tell me a long story.", "--seed", "1", "--max-tokens", "160", "--address", toy_address)) == 0
    lines = terminal.lines
    answer = lines[: next(number for number, line in enumerate(lines) if FIGURES.match(line))]
    expected = formulas.text(1, "Tell me a long story.", min(160, formulas.NATURAL_LENGTH))
    assert answer == textwrap.wrap(expected, 39)


WIDE = "火山是地下的岩浆喷出地面形成的山" * 20
EMOJI = " ".join(f"{sign}{number}" for number, sign in enumerate("🙂🌋🎈🚀" * 30))
LONG = f"before {'x' * 500} between {'y' * 19} {'z' * 20} after"
PARAGRAPHS = "\n\n".join(f"paragraph {number} has some words in it, and a second clause" for number in range(12))


@lengths.drawn_cells(1, ("columns", "rows"), [(80, 24), (20, 6)])
@lengths.drawn_cells(2, "text", [WIDE, EMOJI, LONG, PARAGRAPHS], ids=["wide", "emoji", "long words", "paragraphs"])
def test_nothing_comes_twice_whatever_the_words_are(toy_address: str, columns: int, rows: int, text: str) -> None:
    answer, _ = say(Terminal(columns, rows), text, toy_address)
    assert "".join("".join(answer).split()) == "".join(text.split())
    # Every line but the last ones of paragraphs is well filled: no line was finished early for something that was only drawn.
    assert len(answer) <= 2 * (sum(2 if ord(c) > 0x2FFF else 1 for c in text) // (columns - 1) + text.count("\n") + 2)


@lengths.drawn_cells(
    1, ("before", "after"), [((40, 10), (80, 10)), ((40, 10), (100, 30)), ((60, 12), (60, 24))], ids=["wider", "larger", "higher"]
)
def test_a_window_that_grows_meanwhile(toy_address: str, before: tuple[int, int], after: tuple[int, int]) -> None:
    text = numbered(3280)
    answer, _ = say(Terminal(*before), text, toy_address, resized(*after))
    assert words_of(answer) == text.split()


def test_a_window_that_shrinks_meanwhile(tmp_path: Path) -> None:
    """The emulator cuts lines off that were there before, and those that were on their way; no word comes twice, and what comes after is
    whole. The model takes its time, so that most of the answer comes after."""
    text = numbered(3280)
    with stack(tmp_path, options={"interval_s": 0.05}) as running:
        answer, _ = say(Terminal(80, 24), text, running.address, resized(30, 24))
    shown, own, tail = words_of(answer), set(text.split()), text.split()[200:]
    whole = [word for word in shown if word in own]
    assert len(whole) == len(set(whole)) and shown[-len(tail) :] == tail


def resized(columns: int, rows: int) -> Callable[[Terminal], None]:
    """Gives the window another size, once, in the middle of the text."""
    waits = [True]

    def resize(terminal: Terminal) -> None:
        if waits and b"mountain-top-028 " in terminal.written:
            waits.pop()
            terminal.resize(columns, rows)

    return resize


def test_control_characters_of_an_answer_do_not_steer_the_terminal(toy_address: str) -> None:
    answer, _ = say(Terminal(), "one \x1b[2Jtwo \x07three \x9b31mfour \rfive", toy_address)
    assert words_of(answer) == ["one", "[2Jtwo", "three", "31mfour", "five"]


def test_text_in_a_file_and_the_sound_on_the_terminal(toy_address: str, tmp_path: Path) -> None:
    text = numbered(600)
    terminal = Terminal()
    with (tmp_path / "answer.txt").open("wb") as stdout, file_with(text) as stdin:
        assert terminal.run(("say", "-", "--seed", "1", "--address", toy_address), None, stdin, stdout=stdout.fileno()) == 0
    assert (tmp_path / "answer.txt").read_text().split() == text.split() and b"speaking" in terminal.written
    assert next(line for line in terminal.lines if line).startswith("ttft")


def test_text_in_a_pipe_leaves_the_terminal_to_whoever_reads_it(toy_address: str) -> None:
    read, write = os.pipe()
    terminal = Terminal()
    with os.fdopen(read, "rb") as pipe:
        code = terminal.run(("say", "one two", "--seed", "1", "--address", toy_address), stdout=write)
        os.close(write)
        assert pipe.read().split() == [b"one", b"two"]
    assert code == 0 and b"speaking" not in terminal.written and terminal.lines[0].startswith("ttft")


def test_a_job_in_the_background_draws_nothing(toy_address: str) -> None:
    """As in `omnistage say ... &`: the terminal belongs to what runs in front of it."""
    text = numbered(600)
    terminal = Terminal()
    with file_with(text) as stdin:
        shell = (sys.executable, "-c", "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:], process_group=0).returncode)")
        code = terminal.run(("say", "-", "--seed", "1", "--address", toy_address), None, stdin, under=shell)
    assert code == 0 and b"speaking" not in terminal.written and b"thinking" not in terminal.written
    assert words_of(terminal.lines[:-1])[: len(text.split())] == text.split()
