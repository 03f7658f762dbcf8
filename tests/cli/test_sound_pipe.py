"""`--out -`: the sound on standard output while it is made."""

from __future__ import annotations

import io
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile

from helpers import servers
from helpers.processes import StartedProcess
from helpers.terminal import Terminal
from helpers.toy_pipeline import toy_pipeline
from omnistage.client import Omni


@pytest.fixture(scope="module")
def loud_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a router whose answers have far more sound than a pipe holds."""
    folder = tmp_path_factory.mktemp("loud")
    with servers.toy_address(folder, toy_pipeline(folder, interval_s=0.02, samples_per_frame=4800)) as address:
        yield address


ASK = (sys.executable, "-m", "omnistage.cli", "ask", "Hi", "--seed", "1", "--out", "-", "--address")


def ask(address: str, *words: str) -> StartedProcess[bytes]:
    return StartedProcess([*ASK, address, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def samples(data: bytes) -> np.ndarray:
    """The samples of a WAV file whose head does not know its length, as `aplay` reads it from a pipe."""
    sound, rate_hz = soundfile.read(io.BytesIO(data), dtype="float32")
    assert rate_hz == 24000
    return sound


def wait_for_figures(asking: StartedProcess[bytes]) -> None:
    """All of the answer came, and nothing of it was read."""
    assert asking.stderr is not None
    shown = b""
    while b"ttft" not in shown:
        shown += os.read(asking.stderr.fileno(), 65536)


@pytest.fixture(scope="module")
def whole(loud_address: str) -> np.ndarray:
    with Omni(address=loud_address) as omni:
        audio = omni.generate("Hi", seed=1, max_tokens=40).audio
    assert audio is not None
    return audio.samples


def test_standard_output_is_a_wav_file_and_the_words_stand_elsewhere(loud_address: str, whole: np.ndarray) -> None:
    with ask(loud_address, "--max-tokens", "40") as asking:
        sound, told = asking.communicate(timeout=60)
    assert asking.returncode == 0, told
    assert np.array_equal(samples(sound), whole)
    assert b"ttft" in told and b"w" in told.splitlines()[0]


def test_it_comes_while_it_is_made(loud_address: str) -> None:
    """Long before the end of an answer that goes on for minutes."""
    with ask(loud_address, "--max-tokens", "4000") as asking:
        assert asking.stdout is not None
        assert asking.stdout.read(44 + 9600).startswith(b"RIFF") and asking.poll() is None
        asking.send_signal(signal.SIGINT)
        asking.stdout.close()
        assert asking.wait(30) == 130


def test_a_reader_that_plays_slowly_holds_no_answer_up(loud_address: str, whole: np.ndarray) -> None:
    """The router would cancel a client that reads nothing for ten seconds; the pipe is full long before."""
    with ask(loud_address, "--max-tokens", "40") as asking:
        assert asking.stdout is not None
        wait_for_figures(asking)
        data = b""
        while piece := os.read(asking.stdout.fileno(), 16384):
            data += piece
            time.sleep(0.001)
        assert asking.wait(30) == 0
    assert np.array_equal(samples(data), whole)


def test_a_reader_that_goes_away_ends_it(loud_address: str) -> None:
    with ask(loud_address, "--max-tokens", "4000") as asking:
        assert asking.stdout is not None and asking.stderr is not None
        asking.stdout.read(4096)
        asking.stdout.close()
        assert asking.wait(60) == 128 + signal.SIGPIPE
        assert b"Traceback" not in asking.stderr.read()


def test_ctrl_c_ends_a_pipe_that_nobody_reads(loud_address: str) -> None:
    with ask(loud_address, "--max-tokens", "40") as asking:
        wait_for_figures(asking)
        while asking.poll() is None:  # The signal may come before the command is back from its figures.
            asking.send_signal(signal.SIGINT)
            time.sleep(0.05)
        assert asking.returncode == 130


def test_a_terminal_gets_no_sound(toy_address: str) -> None:
    terminal = Terminal()
    assert terminal.run(("say", "Hi", "--out", "-", "--address", toy_address)) == 1
    assert "standard output is a terminal" in " ".join(terminal.lines)


@pytest.mark.parametrize("words", [("--json",), ("--play",)])
def test_what_cannot_be_together_is_refused(toy_address: str, words: tuple[str, ...]) -> None:
    with ask(toy_address, *words) as asking:
        _, told = asking.communicate(timeout=60)
    assert asking.returncode == 2 and b"--out -" in told


def test_a_file_called_dash_is_not_written(toy_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with ask(toy_address) as asking:
        asking.communicate(timeout=60)
    assert (asking.returncode, list(tmp_path.iterdir())) == (0, [])


def test_a_pipe_that_does_not_wait_gets_all_of_it(loud_address: str, whole: np.ndarray) -> None:
    """A program beside it may have set the pipe so. A full one from which a little was read takes only a part of the next piece."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with (
        StartedProcess([*ASK, loud_address, "--max-tokens", "40"], stdout=writing, stderr=subprocess.DEVNULL) as asking,
        os.fdopen(reading, "rb", buffering=0) as pipe,
    ):
        room = select.poll()
        room.register(writing, select.POLLOUT)
        data, deadline = b"", time.monotonic() + 60
        for _ in range(10):
            while room.poll(0):
                assert time.monotonic() < deadline
                time.sleep(0.005)
            data += pipe.read(5000)
        os.close(writing)
        while piece := pipe.read(1 << 16):
            data += piece
        assert asking.wait(60) == 0
    assert np.array_equal(samples(data), whole)
