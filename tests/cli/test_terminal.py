"""The command as a person at a terminal sees it, and Ctrl-C at any moment: nothing is left, nothing half is there."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import wave
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import soundfile

from helpers import lengths
from helpers.command import omnistage
from helpers.output import COMMAND, names, object_of
from helpers.peer import PlayingPeer, listening
from helpers.processes import ProcessFamily, StartedProcess
from helpers.servers import stack
from helpers.sink import Sink
from helpers.talking import Person
from helpers.terminal import CTRL_C, Terminal, terminal_after, words_of
from helpers.toy_pipeline import toy_pipeline
from omnistage.cli.make.screen import SPINNER
from omnistage.client import Omni, find_loudspeaker
from omnistage.models.fetch.own_files import PREFIX
from omnistage.models.toy import formulas


def test_the_answer_grows_above_a_line_that_shows_the_sound(toy_address: str) -> None:
    terminal = terminal_after("ask", "Hi", "--seed", "1", "--address", toy_address, size=(200, 24))
    assert b"thinking" in terminal.written and b"speaking" in terminal.written
    *answer, figures = terminal.lines
    assert figures.startswith("ttft")
    assert words_of(answer) == formulas.text(1, "Hi", formulas.NATURAL_LENGTH).split()


def test_starting_a_stack_shows_each_process(family: ProcessFamily) -> None:
    written = terminal_after("ask", "Hi", "--pipeline", "toy", "--text-only").written
    assert all(name in written for name in (b"thinker", b"talker", b"code2wav", b"router"))
    assert family.pids() == []


def test_ctrl_c_ends_the_call_and_its_stack(family: ProcessFamily, tmp_path: Path) -> None:
    words = ("ask", "Hi", "--pipeline", toy_pipeline(tmp_path), "--max-tokens", "32768")
    terminal_after(*words, meanwhile=Person(("router", CTRL_C)), code=130)
    assert family.wait_ended() == []


def test_something_turns_until_the_first_word(tmp_path: Path) -> None:
    terminal = terminal_after("ask", "Hi", "--pipeline", toy_pipeline(tmp_path, interval_s=0.7, length=2))
    shown = terminal.written.decode()
    assert sum(f"{turning} thinking" in shown for turning in SPINNER) >= 3
    assert "thinking" not in " ".join(terminal.lines)


def test_an_answer_that_was_cut_says_so_and_what_to_do(toy_address: str) -> None:
    cut, whole = (" ".join(terminal_after("ask", "Hi", *words, "--address", toy_address).lines) for words in (("--max-tokens", "7"), ()))
    assert "cut at 7 tokens; --max-tokens N lets it say more" in cut and "cut at" not in whole


def test_seeds_that_nobody_gave_are_short(toy_address: str) -> None:
    assert 0 <= object_of(omnistage("ask", "Hi", "--json", "--address", toy_address))["seed"] < 10**9


@pytest.fixture
def sink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sink:
    """A loudspeaker of the test's own."""
    sink = Sink(tmp_path / "sink")
    monkeypatch.setenv("OMNISTAGE_PLAYER", sink.variable)
    return sink


def test_the_sound_is_heard_while_it_is_made(toy_address: str, sink: Sink) -> None:
    """Every sample once, in order, and the figures are there before all is heard."""
    terminal = terminal_after("ask", "Hi", "--seed", "1", "--address", toy_address, size=(200, 24))
    with Omni(address=toy_address) as omni:
        audio = omni.generate("Hi", seed=1).audio
    assert audio is not None and np.array_equal(sink.samples(), audio.samples)
    assert terminal.lines[-1].startswith("ttft")


@pytest.mark.parametrize("words", [("--no-play",), ("--text-only",), ("--json",), ("--out", "OUT.wav")])
def test_nothing_is_played_where_nobody_wants_to_hear(
    toy_address: str, tmp_path: Path, sink: Sink, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    terminal_after("ask", "Hi", "--address", toy_address, *words)
    assert not list((tmp_path / "sink").iterdir())


def test_ctrl_c_silences_what_is_still_heard(tmp_path: Path, sink: Sink) -> None:
    """The answer is complete, half a minute of it is to be heard; only listening to it ends."""
    path = toy_pipeline(tmp_path, length=160, samples_per_frame=4800)
    words = ("ask", "Hi", "--seed", "1", "--pipeline", path, "--out", str(tmp_path / "whole.wav"), "--play")
    terminal = terminal_after(*words, size=(200, 24), meanwhile=Person(("playing, ", CTRL_C)), code=130)
    assert b"ttft" in terminal.written
    whole, _ = soundfile.read(tmp_path / "whole.wav", dtype="float32")
    heard = sink.samples()
    assert len(heard) < len(whole) / 2 and np.array_equal(heard, whole[: len(heard)])


def test_without_a_loudspeaker_it_says_how_to_keep_the_sound(toy_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMNISTAGE_PLAYER")
    if find_loudspeaker() is not None:
        pytest.skip("something plays here")
    terminal = terminal_after("ask", "Hi", "--address", toy_address)
    assert "no loudspeaker here; --out F.wav keeps the sound" in " ".join(terminal.lines)


def test_figures_break_between_two_figures(toy_address: str) -> None:
    terminal = terminal_after("ask", "Hi", "--seed", "123456789", "--address", toy_address, size=(48, 24))
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
    terminal = terminal_after("ask", "Tell me a long story.", "--seed", "1", "--max-tokens", "160", "--address", toy_address, size=(40, 10))
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


# Interrupts


MOMENTS = 30
TEXT = "one two three four five six"


def imports(command: list[str], stop_after: int) -> tuple[int, list[bytes], int]:
    """Run a command that tells of its imports; Ctrl-C after so many of them. Its exit code, what else it said, and how many they were."""
    count, said = 0, []
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if not line.startswith(b"import time:"):
                said.append(line)
            elif count or b"omnistage.cli.interrupt" in line:
                count += 1
                if count == stop_after:
                    process.send_signal(signal.SIGINT)
        return process.wait(30), said, count


@lengths.rounds(4, MOMENTS)
def test_while_the_command_is_being_imported(free_port: int, seed: int, rounds: int) -> None:
    """From the import after that of `interrupt` itself to the moment when it waits for a router that is not there."""
    command = [sys.executable, "-X", "importtime", *COMMAND[1:], "ask", "Hi", "--address", f"127.0.0.1:{free_port}"]
    code, said, count = imports([*command, "--timeout", "0.1"], 0)
    assert (code, said[0][:6]) == (1, b"error:")
    assert count > 10 * MOMENTS
    first = 2 + random.Random(seed).randrange(count // rounds)
    for moment in (2, *range(first, count, count // rounds)):
        assert imports(command, moment)[:2] == (130, []), f"after import {moment} of {count}"


AT_ONCE = """
import os, runpy, signal, sys
del sys.modules["signal"]
class Interrupting:
    def find_spec(self, name, *_):
        if name == "signal":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
runpy.run_module("omnistage.cli", run_name="__main__")
"""


def test_before_the_command_has_handlers_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", AT_ONCE], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")


def left() -> list[str]:
    """Folders of logs: the family's own folder for temporary files has nothing else."""
    return names(Path(os.environ["TMPDIR"]))


def assert_whole(path: Path) -> None:
    with wave.open(str(path)) as file:
        assert file.getframerate() == formulas.SAMPLE_RATE_HZ
        assert file.getnframes() == len(formulas.audio(1, TEXT, len(TEXT.split()))) > 0


def wait_for_first_line(pid: int) -> None:
    """Return when the command handles SIGTERM, which Python by itself does not: an interrupt of the interpreter's own start is not ours."""
    deadline = time.monotonic() + 30
    while True:
        (caught,) = (line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt"))
        if int(caught, 16) >> (signal.SIGTERM - 1) & 1:
            return
        assert time.monotonic() < deadline
        time.sleep(0.001)


@lengths.long_form(
    "cli/test_terminal.py::test_while_the_command_is_being_imported",
    "cli/test_terminal.py::test_in_the_middle_of_an_answer",
    "cli/test_terminal.py::test_when_the_answer_is_there_it_stays",
    "client/test_private_stack.py::test_it_ends_a_stack_whose_model_is_being_loaded",
)
@pytest.mark.timeout(900)
@lengths.rounds(3, MOMENTS)
def test_moments_in_the_life_of_a_call(family: ProcessFamily, tmp_path: Path, rounds: int) -> None:
    """Shares of the time that a whole call took just before: the start of the stack, the answer, the files, the end of the stack."""
    outcomes = []
    whole_s = 0.0
    for moment in range(-1, rounds):
        folder = tmp_path / str(moment)
        folder.mkdir()
        out = folder / "x.wav"
        command = [*COMMAND, "say", TEXT, "--seed", "1", "--pipeline", "toy", "--out", str(out)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as call:
            wait_for_first_line(call.pid)
            begin_s = time.monotonic()
            if whole_s:
                time.sleep(moment / rounds * whole_s)
                call.send_signal(signal.SIGINT)
            _, said = call.communicate(timeout=60)
            whole_s = whole_s or time.monotonic() - begin_s
        if call.returncode == 130:
            assert (names(folder), said) == ([], b"")
        else:
            assert (call.returncode, names(folder)) == (0, ["x.wav"]), said
            assert_whole(out)
        outcomes.append(call.returncode)
        assert (family.wait_ended(), left()) == ([], [])
    assert outcomes[:2] == [0, 130]


def test_when_the_answer_is_there_it_stays(family: ProcessFamily, tmp_path: Path) -> None:
    """A person presses Ctrl-C when the figures stand there, as the stack is being stopped."""
    out = tmp_path / "x.wav"
    shown = [b""]

    def press(terminal: Terminal) -> None:
        text = terminal.written.replace(b"^C", b"")  # The terminal shows the keys wherever the command is in its line.
        if b"ttft" in text and text != shown[-1]:
            terminal.press(CTRL_C)
            shown.append(text)

    terminal = terminal_after("say", TEXT, "--seed", "1", "--pipeline", "toy", "--out", str(out), meanwhile=press)
    assert_whole(out)
    assert b"wrote" in shown[-1] and b"Traceback" not in terminal.written
    assert (left(), family.wait_ended()) == ([], [])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_in_the_middle_of_an_answer(tmp_path: Path, number: signal.Signals) -> None:
    """Also for those who end it otherwise: a closed terminal, a supervisor."""
    async with listening(PlayingPeer(6)) as wire:
        words = ("ask", "Hi", "--out", str(tmp_path / "x.wav"), "--timeline", str(tmp_path / "x.png"), "--address", wire.address)
        call = await asyncio.create_subprocess_exec(*COMMAND, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
        assert call.stdout is not None and await call.stdout.read(1)
        assert len(names(tmp_path)) == 2
        for _ in range(3):  # a person in a hurry
            call.send_signal(number)
        _, said = await asyncio.wait_for(call.communicate(), 60)
    assert (call.returncode, said) == (128 + number, b"")
    assert names(tmp_path) == []


def test_a_signal_that_was_ignored_before_stays_ignored(toy_address: str, tmp_path: Path) -> None:
    """As under nohup."""
    ignoring = "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    out = tmp_path / "x.wav"
    command = [sys.executable, "-c", ignoring, *COMMAND, "say", TEXT, "--seed", "1", "--out", str(out), "--address", toy_address]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as call:
        assert call.stdout is not None and call.stdout.read(1)
        call.send_signal(signal.SIGHUP)
        call.communicate(timeout=60)
    assert call.returncode == 0
    assert_whole(out)


# Logs


def words(folder: Path) -> tuple[str, ...]:
    """The words of a call with a stack of its own, of one stage."""
    return ("ask", "Hi", "--pipeline", toy_pipeline(folder), "--text-only")


def folders() -> list[Path]:
    return sorted(Path(os.environ["TMPDIR"]).glob(f"{PREFIX}*"))


@contextmanager
def answering(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A call with a stack of its own, stopped at its first word."""
    with StartedProcess[bytes]([*COMMAND, *words(folder)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as call:
        assert call.stdout is not None and call.stdout.read(1)
        call.send_signal(signal.SIGSTOP)
        yield call
        call.kill()


def ask(folder: Path, *more: str) -> None:
    done = omnistage(*words(folder), *more)
    assert done.returncode == 0, done.stderr


@lengths.long_form("models/test_owned.py::test_what_a_killed_process_leaves_goes_with_the_next_one", unkept="logs of a call are such")
def test_the_logs_of_a_call_stay_while_it_runs_and_go_with_the_next_one_when_it_was_killed(family: ProcessFamily, tmp_path: Path) -> None:
    with answering(tmp_path) as call:
        (mine,) = folders()
        ask(tmp_path)
        assert folders() == [mine] and (mine / "router.log").is_file()
        call.send_signal(signal.SIGKILL)
        call.wait(30)
    assert family.wait_ended() == []
    assert folders() == [mine] and (mine / "router.log").is_file()
    ask(tmp_path, "--verbose")  # It has no folder of its own.
    assert folders() == []
