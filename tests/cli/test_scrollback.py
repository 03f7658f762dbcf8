"""The lines that stay of a long answer on a terminal: its own lines, each once, whatever the size of the window."""

import os
import re
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from helpers import lengths
from helpers.servers import stack
from helpers.terminal import Terminal, words_of
from omnistage.models.toy import formulas

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
