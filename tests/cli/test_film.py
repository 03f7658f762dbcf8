"""`omnistage film` and `omnistage sound` against real stacks of small models: files that grow, what a script and a person get to see, and
what is refused."""

from __future__ import annotations

import subprocess
import wave
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest

from helpers import lengths, servers
from helpers.command import omnistage
from helpers.drawings import checkpoint
from helpers.media_files import picture
from helpers.output import COMMAND, names, object_of, refusal
from omnistage.cli.make.drawing import FilmOrder, resample
from omnistage.cli.make.files import GrowingFile, film_size
from omnistage.client import Omni, VideoDelta
from omnistage.client.errors import RequestError
from omnistage.client.files import FILM_KINDS

SMALL = ("--frames", "5", "--steps", "2", "--size", "32x32", "--seed", "3")

OWN = """
name: own
description: Of a test.
inputs: [text]
outputs: [video]
stages:
  - kind: diffusion
    family: toy-film
defaults:
  diffusion: {frames: 4}
"""

ANSWERING = """
name: answering
description: Of a test.
inputs: [text]
outputs: [text, image, video, audio]
stages: [{kind: thinker, family: toy}]
"""


def diffusers_stack(logs: Path, model: str) -> AbstractContextManager[servers.ServerProcesses]:
    """A small checkpoint with random weights, served. model: a kind of `helpers.drawings.checkpoint`."""
    words = ("--checkpoint", str(checkpoint(model)))
    return servers.stack(logs, kinds=["diffusion"], pipeline="diffusers", family="diffusers", stage_args=words)


@pytest.fixture(scope="module")
def film_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """HOST:PORT of a router in front of a small Wan."""
    with diffusers_stack(tmp_path_factory.mktemp("wan"), "wan2.2-ti2v") as running:
        yield running.address


@pytest.fixture(scope="module")
def sound_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The same of a small Stable Audio."""
    with diffusers_stack(tmp_path_factory.mktemp("stable"), "stable-audio") as running:
        yield running.address


def probed(path: Path) -> list[str]:
    """Codec, width, height, and how many frames there are, by a program of others."""
    command = ["ffprobe", "-v", "error", "-count_frames", "-select_streams", "v", "-of", "csv=p=0"]
    entries = ["-show_entries", "stream=codec_name,width,height,nb_read_frames", str(path)]
    return subprocess.run([*command, *entries], capture_output=True, text=True, check=True).stdout.strip().split(",")


@pytest.mark.parametrize(
    ("name", "words", "codec", "media_type"),
    [("hill.webm", (), "vp9", "video/webm"), ("hill.MP4", (), "vp9", "video/mp4"), ("hill.mp4", ("--codec", "h264"), "h264", "video/mp4")],
)
def test_a_film_is_a_file_and_a_line_of_figures(
    film_address: str, tmp_path: Path, name: str, words: tuple[str, ...], codec: str, media_type: str
) -> None:
    out = tmp_path / name
    out.write_bytes(b"an older one, which goes")
    done = omnistage("film", "-", "--out", out, *SMALL, *words, "--address", film_address, text="a hill")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    *steps, figures = done.stderr.splitlines()
    assert steps == ["step 1 of 2", "step 2 of 2"]
    for part in (f"wrote {out} · 5 frames · 32×32 pixels · ", " s · 2 steps · pipeline diffusers · seed 3"):
        assert part in figures
    assert probed(out) == [codec, "32", "32", "5"]
    assert names(tmp_path) == [name]
    options = {"frames": 5, "steps": 2, "width": 32, "height": 32, "seed": 3}
    asked = media_type + ('; codecs="avc1"' if words else "")
    with Omni(address=film_address) as omni:
        (expected,) = omni.film("a hill", media_type=asked, **options).videos  # type: ignore[arg-type]
    assert out.read_bytes() == expected.data and expected.media_type == media_type
    expected.save(tmp_path / f"again{out.suffix}")


def test_a_film_of_a_picture_without_a_name_is_one_object(film_address: str, tmp_path: Path) -> None:
    (tmp_path / "hill.png").write_bytes(picture(1))
    words = ("--image", "hill.png", "--fps", "8", "--flow-shift", "3", "--json", *SMALL)
    done = omnistage("film", "A hill", *words, "--address", film_address, folder=tmp_path)
    told = object_of(done)
    assert done.stderr == ""
    keys = ["path", "media_type", "frames", "width", "height", "e2e_s", "steps", "seed", "pipeline", "failovers", "drew", "notes"]
    assert list(told) == keys
    assert (told["path"], told["media_type"], told["frames"], told["width"], told["seed"]) == ("hill-2.webm", "video/webm", 5, 32, 3)
    assert names(tmp_path) == ["hill-2.webm", "hill.png"]


@lengths.drawn_cells(
    3,
    ("words", "told"),
    [
        (["--out", "x.gif"], "error: --out x.gif: only WebM and MP4 can be written"),
        (["--out", "x.webm", "--codec", "h264"], "error: --codec h264: no .webm is encoded so"),
        (["--out", "x.webm", "--guidance-2", "2"], "error: --guidance-2: "),
        (["--out", "x.webm", "--frames", "60000"], "error: --frames: "),
        (["--out", "x.webm", "--frames", "9", "--seconds", "1"], "error: --seconds: frames say how long the film of "),
        (["--out", "x.webm", "--size", "33x32"], "error: --size: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_filmed_leaves_nothing(film_address: str, tmp_path: Path, words: list[str], told: str) -> None:
    lines = refusal("film", "a hill", *words, "--address", film_address, folder=tmp_path)
    assert told in " ".join(" ".join(lines).split()) and names(tmp_path) == []


def test_each_kind_says_what_it_makes(film_address: str, sound_address: str, tmp_path: Path) -> None:
    for words, address, told in (
        (("draw", "a hill"), film_address, "error: --out: diffusers gives video, progress, latents, pixels, not 'image'"),
        (("sound", "rain", "--out", "x.wav"), film_address, "diffusers gives video, progress, latents, pixels, not 'audio'"),
        (("film", "a hill"), sound_address, "diffusers gives audio, progress, latents, not 'video'"),
        (("ask", "Why?", "--text-only"), film_address, "hint: It makes films: `omnistage film PROMPT --out F.webm`"),
        (("ask", "Why?", "--out", "x.wav"), sound_address, "hint: It makes sound of a prompt: `omnistage sound PROMPT --out F.wav`"),
        (("say", "Hello."), sound_address, "diffusers does not speak a text"),
    ):
        done = omnistage(*words, "--address", address, folder=tmp_path)
        assert done.returncode == 1 and told.removeprefix("error: --out: ") in " ".join(done.stderr.split()), (words, done.stderr)
    assert names(tmp_path) == []


@lengths.long_form("cli/test_film.py::test_each_kind_says_what_it_makes", unkept="`omnistage bench` measures films")
def test_a_question_makes_no_film_and_says_what_does(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(OWN)
    with Omni(pipeline=str(tmp_path / "own.yaml")) as omni:
        asked = omnistage("ask", "a hill", "--address", omni.address)
        loaded = omnistage("bench", "--draw", "-c", "1", "-n", "2", "--address", omni.address)
    told = " ".join(asked.stderr.split())
    assert asked.returncode == 1 and "2 of 2 completed" in loaded.stdout + loaded.stderr
    assert "error: own makes films and does not answer" in told and "`omnistage film PROMPT --out F.webm`" in told


def test_without_a_router_the_pipelines_that_can_are_named(tmp_path: Path) -> None:
    variables = {"OMNISTAGE_ROUTER": "none"}
    for words, port, example in (
        (("film", "a hill", "--out", "x.webm"), "video", "Wan 2.2"),
        (("sound", "rain", "--out", "x.wav"), "audio", "Stable Audio Open"),
    ):
        lines = " ".join(" ".join(refusal(*words, folder=tmp_path, variables=variables)).split())
        assert f"gives image, progress, not {port}" in lines
        assert f"a checkpoint of diffusers that gives {port}, such as {example} (its folder, or OWNER/NAME) or toy-film." in lines
    assert names(tmp_path) == []


@lengths.long_form(
    "cli/test_film.py::test_a_film_is_a_file_and_a_line_of_figures",
    "cli/test_commands.py::test_without_an_address_a_stack_is_started_for_the_call",
)
def test_a_stack_of_a_folder_makes_a_film(tmp_path: Path) -> None:
    done = omnistage("film", "a hill", "--out", "x.webm", *SMALL, "--model", checkpoint("wan2.2-t2v"), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert probed(tmp_path / "x.webm") == ["vp9", "32", "32", "5"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("film", "a hill", "--out", "x.webm"), "error: answering makes no films"),
        (("sound", "rain", "--out", "x.wav"), "error: answering makes no sound of a prompt"),
        (("draw", "a hill", "--out", "x.png"), "error: answering does not draw"),
    ],
)
def test_a_pipeline_that_only_says_it_can_makes_nothing_of_a_prompt(tmp_path: Path, words: tuple[str, ...], told: str) -> None:
    """It has no stage that draws."""
    (tmp_path / "answering.yaml").write_text(ANSWERING)
    error, hint = refusal(*words, "--pipeline", "./answering.yaml", folder=tmp_path, variables={"OMNISTAGE_ROUTER": "none"})
    assert error == told and hint.startswith("hint: Give another --pipeline")
    assert names(tmp_path) == ["answering.yaml"]


# Sound ---------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rain.wav", "rain.flac", "rain.opus", "rain.mp3"])
def test_a_sound_is_a_file_and_a_line_of_figures(sound_address: str, tmp_path: Path, name: str) -> None:
    out = tmp_path / name
    done = omnistage("sound", "rain", "--seconds", "0.5", "--steps", "2", "--seed", "3", "--out", out, "--address", sound_address)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    *steps, figures = done.stderr.splitlines()
    assert steps == ["step 1 of 2", "step 2 of 2"]
    assert f"wrote {out} · audio 0.50 s · e2e " in figures and "2 steps · pipeline diffusers · seed 3" in figures
    command = ["ffprobe", "-v", "error", "-show_entries", "format=duration", "-of", "csv=p=0", str(out)]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(told.stdout) == pytest.approx(0.5, abs=0.08)
    assert names(tmp_path) == [name]


def test_a_sound_that_nobody_hears_gets_a_name_and_a_pipe_gets_wav(sound_address: str, tmp_path: Path) -> None:
    common = ("sound", "Rain!", "--seconds", "0.25", "--begin", "0.25", "--steps", "2", "--seed", "3", "--address", sound_address)
    assert omnistage(*common, folder=tmp_path).returncode == 0
    assert names(tmp_path) == ["rain.wav"]
    with wave.open(str(tmp_path / "rain.wav")) as file:
        frames, rate_hz = file.readframes(file.getnframes()), file.getframerate()
        assert file.getnframes() == round(0.25 * rate_hz)
    done = omnistage(*common, "--json", folder=tmp_path)
    told = object_of(done)
    assert (told["path"], told["audio_s"], told["sample_rate_hz"]) == (None, 0.25, rate_hz) and done.stderr == ""
    with subprocess.Popen([*COMMAND, *common, "--out", "-"], stdout=subprocess.PIPE, cwd=tmp_path) as piped:
        sound, _ = piped.communicate(timeout=100)
    assert piped.returncode == 0 and sound.startswith(b"RIFF") and sound.endswith(frames)
    assert names(tmp_path) == ["rain.wav"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--out", "x.txt"], "only WAV, FLAC, Ogg Vorbis, Opus and MP3 can be written"),
        (["--seconds", "3000", "--out", "x.wav"], "error: --seconds: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_heard_is_told(sound_address: str, tmp_path: Path, words: list[str], told: str) -> None:
    lines = refusal("sound", "rain", *words, "--address", sound_address, folder=tmp_path)
    assert told in " ".join(" ".join(lines).split()) and names(tmp_path) == []


def test_another_rate_has_the_same_waves() -> None:
    at = np.arange(44100 * 2) / 44100
    wave_at = lambda times: np.sin(2 * np.pi * 440 * times) * np.sin(np.pi * times / 2) ** 2  # noqa: E731
    made = resample(wave_at(at).astype(np.float32), 44100, 48000)
    np.testing.assert_allclose(made, wave_at(np.arange(96000) / 48000), atol=1e-4)


# Parts ---------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("out", "codec", "path", "media_type"),
    [
        (None, None, "hill.webm", "video/webm"),
        (None, "vp9", "hill.webm", "video/webm"),
        (None, "h264", "hill.mp4", 'video/mp4; codecs="avc1"'),
        (Path("x.mp4"), None, "x.mp4", "video/mp4"),
        (Path("X.MP4"), "vp9", "X.MP4", "video/mp4"),
        (Path("X.MP4"), "h264", "X.MP4", 'video/mp4; codecs="avc1"'),
    ],
)
def test_where_a_film_goes_and_how_it_is_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: Path | None, codec: str | None, path: str, media_type: str
) -> None:
    monkeypatch.chdir(tmp_path)
    order = FilmOrder("a hill", out, {}, as_json=False, images=(), sized=False, codec=codec)
    order.check()
    assert (str(order.path), order.options["media_type"]) == (path, media_type)


def test_a_file_grows_at_its_place_and_what_came_stays(tmp_path: Path) -> None:
    out = tmp_path / "x.webm"
    out.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), GrowingFile(out, "--out", FILM_KINDS) as file:
        assert out.read_bytes() == b"old"
        file.append(b"one")
        assert out.read_bytes() == b"one"
        file.append(b"two")
        raise KeyboardInterrupt
    assert out.read_bytes() == b"onetwo" and names(tmp_path) == ["x.webm"]
    with GrowingFile(out, "--out", FILM_KINDS):
        pass
    assert out.read_bytes() == b"onetwo" and names(tmp_path) == ["x.webm"]
    with GrowingFile(out, "--out", FILM_KINDS) as file:
        file.append(b"one")
        out.unlink()
        with pytest.raises(RequestError, match=r"x\.webm"):  # It is not begun anew, without its head.
            file.append(b"two")
    assert names(tmp_path) == []


def test_the_head_of_a_film_says_its_size(film_address: str) -> None:
    with Omni(address=film_address) as omni:
        for media_type in ("video/webm", "video/mp4", 'video/mp4; codecs="avc1"'):
            events = omni.stream_film("a hill", frames=5, steps=1, width=64, height=32, media_type=media_type)
            first = next(event for event in events if isinstance(event, VideoDelta))
            assert film_size(first.data) == (64, 32)
            assert all(film_size(first.data[:end]) in (None, (64, 32)) for end in range(len(first.data)))
    assert film_size(b"no film at all") is None and film_size(b"") is None
