"""The examples do what their pages say: those in Python, and the clients in other languages beside the Python client."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import wave
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml

from helpers import lengths
from helpers.example import QUESTION, TIMEOUT_S, Example
from helpers.ports import take_address
from helpers.serving import TIME
from omnistage.client import Omni
from omnistage.client.files import to_pcm16
from omnistage.models.toy.files import png
from tools.examples import EXAMPLES, LANGUAGES, ROOT, build


def run(name: str, *words: str, text: str = "", folder: Path, told: str = "") -> str:
    """The output of an example. told: how its text on stderr begins; empty: there is none."""
    command = [sys.executable, str(EXAMPLES / name), *words]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert TIME.sub("", done.stderr).startswith(told) if told else done.stderr == ""
    return done.stdout


def test_ask(toy_address: str, tmp_path: Path) -> None:
    output = run("ask.py", "Hi", "--address", toy_address, folder=tmp_path)
    assert "s of sound in answer.wav" in output
    with wave.open(str(tmp_path / "answer.wav")) as file:
        assert file.getnframes() > 0


def test_stream(toy_address: str, tmp_path: Path) -> None:
    assert "real-time factor" in run("stream.py", "Hi", "--address", toy_address, folder=tmp_path)


def test_omni(toy_address: str, tmp_path: Path) -> None:
    output = run("omni.py", "Hi", "--address", toy_address, "--seconds", "2", "--out", "answer.flac", folder=tmp_path)
    assert "[first sound after " in output and output.endswith(" s of sound in answer.flac\n")
    assert (tmp_path / "answer.flac").read_bytes().startswith(b"fLaC")


def test_chat(toy_address: str, tmp_path: Path) -> None:
    output = run("chat.py", "--address", toy_address, text="Hello\n\nAnd then?\n", folder=tmp_path)
    first, second = output.splitlines()
    assert first and second and first != second


@lengths.long_form(
    "client/test_drawing.py::test_a_film_is_a_file_with_its_type_and_frames",
    "client/test_drawing.py::test_a_sound_is_heard_and_saved",
    unkept="the examples of films and sounds work",
)
def test_film_and_sound(tmp_path: Path) -> None:
    (tmp_path / "hill.png").write_bytes(png(np.full((4, 4), 3, np.uint8)))
    with Omni(pipeline="toy-film") as omni:
        words = ["a walk", "--frames", "5", "--image", "hill.png", "--out", "walk.grey", "--address", omni.address]
        assert "step 6 of 6\n5 frames in walk.grey, seed " in run("film.py", *words, folder=tmp_path)
        assert len((tmp_path / "walk.grey").read_bytes()) == 5 * 32 * 32
        words = ["rain", "--seconds", "0.5", "--address", omni.address]
        assert run("sound.py", *words, folder=tmp_path).startswith("0.50 s of sound in sound.wav, seed ")
    assert (tmp_path / "sound.wav").read_bytes().startswith(b"RIFF")


def test_rescue(tmp_path: Path) -> None:
    words = ["Hi", "--pipeline", "toy", "--chunks", "1", "--timeline", "rescue.png"]
    output = run("rescue.py", *words, folder=tmp_path, told="lost talker-")
    assert "killed the talker at 127.0.0.1:" in output
    assert output.endswith("the same words and the same samples as without the kill\n")
    assert (tmp_path / "rescue.png").stat().st_size > 10_000


SEED = 2**63 + 7
"""The seed does not fit into a signed number of 64 bits: languages without unsigned numbers must pass it on correctly too."""
MAKES_MINUTES = [pytest.mark.long, pytest.mark.timeout(900)]
"""A compiler of C++, beside other tests."""


@pytest.fixture(scope="module", params=[pytest.param(name, marks=[] if name == "node" else MAKES_MINUTES) for name in LANGUAGES])
def example(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Example:
    """It is built, in a folder of its own."""
    language = LANGUAGES[request.param]
    if missing := language.missing():
        pytest.skip(f"not on this machine: {', '.join(missing)}; `make examples` says what to install")
    return Example(build(language), tmp_path_factory.mktemp(language.name))


@pytest.fixture
def full_address(tmp_path: Path) -> Iterator[str]:
    """Address of a router with one place, whose answers take half an hour."""
    pipeline = yaml.safe_load((ROOT / "deploy" / "pipelines" / "toy.yaml").read_text(encoding="utf-8"))
    pipeline["stages"][0]["options"] = {"interval_s": 0.05, "length": 30_000, "max_chunk": 1}
    pipeline["defaults"] = {"thinker": {"max_tokens": 30_000}}
    (tmp_path / "slow.yaml").write_text(yaml.safe_dump(pipeline), encoding="utf-8")
    with Omni(pipeline=str(tmp_path / "slow.yaml"), max_sessions=1) as omni:
        yield omni.address


def reason(result: tuple[int, str, str]) -> str:
    """The error that a failed example told last."""
    status, _, err = result
    assert status == 1, err
    return err.strip().rpartition("\n")[2]


def test_it_gets_the_text_and_the_samples_of_the_python_client(example: Example, toy_address: str) -> None:
    with Omni(address=toy_address) as omni:
        answer = omni.generate(QUESTION, seed=SEED)
    assert answer.audio is not None
    assert example.run(toy_address, str(SEED)) == (0, answer.text + "\n", "")
    with wave.open(str(example.folder / "answer.wav")) as file:
        assert (file.getframerate(), file.getsampwidth(), file.getnchannels()) == (answer.audio.sample_rate, 2, 1)
        assert file.readframes(file.getnframes()) == to_pcm16(answer.audio.samples)


def test_it_tells_what_is_wrong_with_a_request(example: Example, toy_address: str) -> None:
    assert re.fullmatch(
        r"error: UNKNOWN_MODEL: .*'no-such-model'.*; field model", reason(example.run(toy_address, str(SEED), "no-such-model"))
    )


def test_it_tells_when_to_ask_again_and_ctrl_c_cancels(example: Example, full_address: str) -> None:
    with example.start(full_address) as first:
        try:
            assert first.stdout is not None and os.read(first.stdout.fileno(), 1)  # It has the only place.
            delay = re.fullmatch(r"error: OVERLOADED: .*; ask again in ([0-9.]+) s", reason(example.run(full_address)))
            assert delay is not None and float(delay[1]) > 0
            first.send_signal(signal.SIGINT)
            out, err = first.communicate(timeout=TIMEOUT_S)
        finally:
            first.kill()
    assert re.fullmatch(r"error: (?i:.*cancell?ed.*)", reason((first.returncode, out, err)))


def test_it_tells_that_nobody_is_there(example: Example) -> None:
    status, out, err = example.run(take_address())
    assert (status, out.strip()) == (1, "") and err.strip().startswith("error: ")
