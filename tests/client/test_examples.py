"""The examples run as they are printed."""

import subprocess
import sys
import wave
from pathlib import Path

import numpy as np

from helpers import lengths
from omnistage.client import Omni
from omnistage.models.toy.files import png

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name: str, *words: str, text: str = "", folder: Path, told: str = "") -> str:
    """The output of an example. told: how its text on stderr begins; empty: there is none."""
    command = [sys.executable, str(EXAMPLES / name), *words]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(told) if told else done.stderr == ""
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
    assert first
    assert second
    assert first != second


@lengths.long_form(
    "client/test_films.py::test_a_film_is_a_file_with_its_type_and_frames",
    "client/test_films.py::test_a_sound_is_heard_and_saved",
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
