"""Ctrl-C at any moment: nothing is left, nothing half is there, and what was complete stays; and logs of a call that was killed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from helpers import lengths
from helpers.command import omnistage
from helpers.peer import PlayingPeer, listening
from helpers.processes import ProcessFamily, StartedProcess
from helpers.terminal import CTRL_C, Terminal
from helpers.toy_pipeline import toy_pipeline
from omnistage.models.fetch.disk import PREFIX
from omnistage.models.toy import formulas

COMMAND = (sys.executable, "-m", "omnistage.cli")
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


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


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
    "cli/test_interrupts.py::test_while_the_command_is_being_imported",
    "cli/test_interrupts.py::test_in_the_middle_of_an_answer",
    "cli/test_interrupts.py::test_when_the_answer_is_there_it_stays",
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

    terminal = Terminal()
    assert terminal.run(("say", TEXT, "--seed", "1", "--pipeline", "toy", "--out", str(out)), press) == 0
    assert_whole(out)
    assert b"wrote" in shown[-1] and b"Traceback" not in terminal.written
    assert (left(), family.wait_ended()) == ([], [])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_in_the_middle_of_an_answer(tmp_path: Path, number: signal.Signals) -> None:
    """Also for those who end it otherwise: a closed terminal, a supervisor."""
    async with listening(PlayingPeer(6)) as wire:
        words = ("ask", "Hi", "--out", str(tmp_path / "x.wav"), "--timeline", str(tmp_path / "x.png"), "--address", wire.address)
        call = await asyncio.create_subprocess_exec(*COMMAND, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
        assert call.stdout is not None
        assert await call.stdout.read(1)
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
        assert call.stdout is not None
        assert call.stdout.read(1)
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
    with StartedProcess[bytes](
        [sys.executable, "-m", "omnistage.cli", *words(folder)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as call:
        assert call.stdout is not None
        assert call.stdout.read(1)
        call.send_signal(signal.SIGSTOP)
        yield call
        call.kill()


def ask(folder: Path, *more: str) -> None:
    done = omnistage(*words(folder), *more)
    assert done.returncode == 0, done.stderr


@lengths.long_form(
    "models/test_owned.py::test_what_a_killed_process_leaves_goes_with_the_next_one",
    unkept="the logs of a call are in a folder that goes with the next call",
)
def test_the_logs_of_a_call_stay_while_it_runs_and_go_with_the_next_one_when_it_was_killed(family: ProcessFamily, tmp_path: Path) -> None:
    with answering(tmp_path) as call:
        (mine,) = folders()
        ask(tmp_path)
        assert folders() == [mine]
        assert (mine / "router.log").is_file()
        call.send_signal(signal.SIGKILL)
        call.wait(30)
    assert family.wait_ended() == []
    assert folders() == [mine]
    assert (mine / "router.log").is_file()
    ask(tmp_path, "--verbose")  # It has no folder of its own.
    assert folders() == []
