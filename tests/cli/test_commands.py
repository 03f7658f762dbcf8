"""The command against a real toy stack: what scripts and people get to see."""

import asyncio
import json
import subprocess
import sys
import wave
from pathlib import Path

import numpy as np
import pytest
import soundfile

from helpers.command import omnistage
from helpers.output import COMMAND, object_of, refusal
from helpers.peer import TEXT, PlayingPeer, answer, listening
from helpers.terminal import terminal_after
from omnistage.models.toy import formulas
from omnistage.v1 import omni_pb2, stage_pb2

SPOKEN_KEYS = ["text", "ttft_s", "ttfa_s", "e2e_s", "audio_s", "rtf", "finish_reason", "seed", "pipeline", "failovers", "drew", "notes"]
SPOKEN_KEYS += ["unspoken", "unspoken_words"]

PNG = b"\x89PNG\r\n\x1a\n"

MAKE = "hint: Make it first: mkdir -p absent"
EMPTY = ["error: the text is empty", 'hint: Give the words, such as "What is a kite?", or - for those of standard input.']


def test_ask_prints_the_answer_and_the_figures(toy_address: str) -> None:
    done = omnistage("ask", "Hello there", "--seed", "5", "--address", toy_address)
    assert done.returncode == 0, done.stderr
    assert done.stdout == formulas.text(5, "Hello there", formulas.NATURAL_LENGTH) + "\n"
    (figures,) = done.stderr.splitlines()
    for name in ("ttft", "ttfa", "audio", "rtf", "pipeline toy", "seed 5"):
        assert name in figures


def test_ask_json_is_one_object(toy_address: str) -> None:
    result = object_of(omnistage("ask", "Hi", "--seed", "5", "--json", "--address", toy_address))
    assert list(result) == SPOKEN_KEYS and result["text"] == formulas.text(5, "Hi", formulas.NATURAL_LENGTH)
    samples = len(formulas.audio(5, "Hi", formulas.NATURAL_LENGTH))
    assert result["audio_s"] == pytest.approx(samples / formulas.SAMPLE_RATE_HZ, abs=1e-6)
    assert (result["seed"], result["pipeline"], result["finish_reason"], result["failovers"]) == (5, "toy", "stop", [])
    assert 0 < result["ttft_s"] <= result["e2e_s"] and 0 < result["ttfa_s"] <= result["e2e_s"]
    assert 0 < result["rtf"] <= result["e2e_s"] / result["audio_s"] + 1e-3


async def test_a_loss_is_told_in_a_line(tmp_path: Path) -> None:
    told = stage_pb2.Failover(kind=stage_pb2.STAGE_KIND_TALKER, lost="a:1", replica="b:2", reason="killed")
    told.pause.FromMilliseconds(35)
    events = list(answer(omni_pb2.GenerateRequest()))
    events.insert(3, omni_pb2.GenerateResponse(failover=told))
    picture = tmp_path / "rescue.png"
    async with listening(PlayingPeer(events, events)) as wire:
        words = ("ask", "Hi", "--address", wire.address)
        for_people = await asyncio.to_thread(omnistage, *words, "--timeline", picture)
        for_scripts = await asyncio.to_thread(omnistage, *words, "--json")
    assert (for_people.returncode, for_people.stdout) == (0, f"{TEXT}\n"), for_people.stderr
    line, figures, wrote = for_people.stderr.splitlines()
    assert line.startswith("talker lost at 0.") and line.endswith(" s, another went on after 35 ms; the listener noticed nothing")
    assert "seed 7" in figures and wrote == f"wrote {picture}"
    assert picture.read_bytes().startswith(PNG)
    (failover,) = object_of(for_scripts)["failovers"]
    assert list(failover) == ["stage", "lost", "replica", "reason", "at_s", "pause_s"]
    assert (failover["stage"], failover["pause_s"]) == ("talker", 0.035)


def test_text_only(toy_address: str) -> None:
    result = object_of(omnistage("ask", "Hi", "--text-only", "--json", "--address", toy_address))
    assert result["text"] and (result["ttfa_s"], result["rtf"], result["audio_s"]) == (None, None, 0)


@pytest.mark.parametrize(("words", "text"), [(("Good morning to you.",), ""), (("-",), "Good morning to you.")], ids=["word", "input"])
def test_say_speaks_exactly_the_text(toy_address: str, words: tuple[str, ...], text: str) -> None:
    result = object_of(omnistage("say", *words, "--json", "--address", toy_address, text=text))
    assert result["text"].split() == ["Good", "morning", "to", "you."] and result["audio_s"] > 0


@pytest.mark.parametrize("words", [["ask", "Hi"], ["say", "one two"]])
def test_output_for_scripts_is_on_stdout_and_for_people_on_stderr(toy_address: str, tmp_path: Path, words: list[str]) -> None:
    done = omnistage(*words, "--seed", "3", "--out", tmp_path / "x.wav", "--json", "--address", toy_address)
    assert (list(object_of(done)), done.stderr) == (SPOKEN_KEYS, "")


def test_files(toy_address: str, tmp_path: Path) -> None:
    wav, png = tmp_path / "answer.wav", tmp_path / "answer.png"
    done = omnistage("ask", "Hi", "--seed", "7", "--out", wav, "--timeline", png, "--address", toy_address)
    assert done.returncode == 0, done.stderr
    assert f"wrote {wav}, {png}" in done.stderr
    with wave.open(str(wav)) as file:
        assert file.getframerate() == formulas.SAMPLE_RATE_HZ
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    expected = formulas.audio(7, "Hi", formulas.NATURAL_LENGTH)[:, 0]
    assert np.array_equal(samples / np.float32(32768), expected)
    picture = png.read_bytes()
    assert picture.startswith(PNG)
    width, height = (int.from_bytes(picture[start : start + 4], "big") for start in (16, 20))
    assert width == 1800 and 600 <= height <= 1000


def test_sound_at_another_rate(toy_address: str, tmp_path: Path) -> None:
    """A file at that rate, and figures of the same sound."""
    soxr = pytest.importorskip("soxr", reason="the models extra is not installed")
    for words in (["ask", "Hi"], ["say", "one two three four five six seven"]):
        own, told = (
            object_of(omnistage(*words, "--seed", "7", "--out", tmp_path / "x.wav", "--json", "--address", toy_address, *more))
            for more in ([], ["--sample-rate", "16000"])
        )
        assert told["audio_s"] == pytest.approx(own["audio_s"], abs=1 / 16000)
        assert 0 < told["rtf"] <= told["e2e_s"] / told["audio_s"] + 1e-3
        with wave.open(str(tmp_path / "x.wav")) as file:
            assert file.getframerate() == 16000
            samples = np.frombuffer(file.readframes(file.getnframes()), "<i2") / np.float32(32768)
        assert len(samples) == round(told["audio_s"] * 16000)
        if words[0] == "ask":
            expected = soxr.resample(formulas.audio(7, "Hi", formulas.NATURAL_LENGTH)[:, 0], 24000, 16000, "VHQ")
            assert np.abs(samples - expected).max() < 1.01 / 65536


@pytest.mark.parametrize(
    ("name", "words", "subtype"),
    [
        ("x.wav", ["--encoding", "float32"], "FLOAT"),
        ("x.wav", ["--encoding", "pcm16"], "PCM_16"),
        ("x.flac", [], "PCM_16"),
        ("x.opus", [], "OPUS"),
        ("x.MP3", [], "MPEG_LAYER_III"),
    ],
)
def test_files_of_every_kind(toy_address: str, tmp_path: Path, name: str, words: list[str], subtype: str) -> None:
    done = omnistage("ask", "Hi", "--seed", "7", "--out", tmp_path / name, *words, "--address", toy_address)
    assert done.returncode == 0, done.stderr
    assert f"wrote {tmp_path / name}" in done.stderr and [path.name for path in tmp_path.iterdir()] == [name]
    assert soundfile.info(tmp_path / name).subtype == subtype
    samples, rate_hz = soundfile.read(tmp_path / name, dtype="float32")
    expected = formulas.audio(7, "Hi", formulas.NATURAL_LENGTH)[:, 0]
    assert (rate_hz, len(samples)) == (formulas.SAMPLE_RATE_HZ, len(expected))
    assert name in ("x.opus", "x.MP3") or np.array_equal(samples, expected)


def test_who_speaks_how_and_for_how_long(toy_address: str, tmp_path: Path) -> None:
    """One frame of the toy voice is 240 samples."""
    words = ("say", "one two three four", "--voice", "toy", "--profile", "latency", "--max-frames", "2", "--json", "--address", toy_address)
    told = object_of(omnistage(*words, "--out", tmp_path / "x.wav"))
    assert told["audio_s"] == pytest.approx(2 * formulas.SAMPLES_PER_FRAME / formulas.SAMPLE_RATE_HZ)


def test_a_rate_that_is_not_possible_is_refused_in_the_words_of_the_command(toy_address: str, tmp_path: Path) -> None:
    error, *_ = refusal("say", "Hi", "--sample-rate", "12345", "--out", tmp_path / "x.wav", "--address", toy_address)
    assert error.startswith("error: --sample-rate: 12345 is not possible; ask for one of 8000, 11025, ")
    assert not (tmp_path / "x.wav").exists()


def test_max_tokens(toy_address: str) -> None:
    result = object_of(omnistage("ask", "Hi", "--max-tokens", "3", "--json", "--address", toy_address))
    assert (len(result["text"].split()), result["finish_reason"]) == (3, "length")


def test_two_at_once_get_their_own_answers(toy_address: str) -> None:
    command = [*COMMAND, "ask", "--json", "--address", toy_address]
    both = [subprocess.Popen([*command, "--seed", str(seed), f"q{seed}"], stdout=subprocess.PIPE, text=True) for seed in (1, 2)]
    for seed, process in zip((1, 2), both, strict=True):
        output, _ = process.communicate(timeout=60)
        assert json.loads(output.splitlines()[-1])["text"] == formulas.text(seed, f"q{seed}", formulas.NATURAL_LENGTH)


def test_pipelines(toy_address: str) -> None:
    (pipeline,) = object_of(omnistage("pipelines", "--json", "--address", toy_address))["pipelines"]
    assert (pipeline["name"], pipeline["outputs"]) == ("toy", ["text", "audio"])
    assert pipeline["description"] in omnistage("pipelines", "--address", toy_address).stdout
    assert omnistage("models", "--address", toy_address).stdout == omnistage("pipelines", "--address", toy_address).stdout


def test_without_an_address_a_stack_is_started_for_the_call() -> None:
    result = object_of(omnistage("ask", "Hi", "--pipeline", "toy", "--seed", "1", "--json"))
    assert result["text"] == formulas.text(1, "Hi", formulas.NATURAL_LENGTH)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["ask", "Hi", "--pipeline", "absent"], ["error: no pipeline 'absent'; this router has toy (toy-thinker)"]),
        (["say", " "], EMPTY),
        (["ask", "Hi", "--voice", "Ann"], ["error: --voice: no voice 'Ann'; there is only 'toy'"]),
        (["ask", "Hi", "--out", "absent/x.wav"], ["error: --out absent/x.wav: its folder does not exist", MAKE]),
    ],
)
def test_an_error_is_one_line_and_a_hint(toy_address: str, words: list[str], told: list[str]) -> None:
    """Which is there only where it says what the line does not."""
    assert refusal(*words, "--address", toy_address) == told


def test_a_time_limit_that_is_too_short_is_told_with_what_to_give(toy_address: str) -> None:
    """Where it passes, before the connection or behind it, the machine decides."""
    error, hint = refusal("ask", "Hi", "--max-tokens", "32768", "--timeout", "0.002", "--address", toy_address)
    assert error.startswith("error: ") and hint.startswith("hint: Give more time: --timeout")


def test_verbose_shows_the_traceback(toy_address: str) -> None:
    assert "Traceback" in "\n".join(refusal("ask", "", "--address", toy_address, "--verbose"))


def test_nobody_at_the_address(free_port: int) -> None:
    lines = "\n".join(refusal("status", "--address", f"127.0.0.1:{free_port}", "--timeout", "0.3"))
    assert f"no server answers at 127.0.0.1:{free_port}" in lines and "omnistage serve" in lines


@pytest.mark.parametrize("word", ["talker", "talker=0", "2", "=2"])
def test_a_wrong_number_of_replicas_is_told_as_it_was_typed(word: str) -> None:
    done = omnistage("serve", "toy", "--replicas", word)
    shown = " ".join(done.stderr.replace("│", " ").split())
    assert done.returncode == 2 and "Usage" in shown and f"--replicas {word}: expected [PIPELINE/]STAGE=" in shown


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["serve", "absent"], "no pipeline 'absent'"),
        (["serve", "toy", "--replicas", "diffusion=2"], "toy has no diffusion"),
        (["serve", "toy", "--checkpoint", "absent"], "is not a folder"),
    ],
)
def test_a_stack_that_cannot_be(words: list[str], told: str) -> None:
    done = omnistage(*words)
    assert done.returncode == 1 and told in done.stderr


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ("nonesuch", "error: no pipeline 'nonesuch', and no folder or model of this name"),
        ("smoll", "error: no pipeline 'smoll', and no folder or model of this name; did you mean smol?"),
        ("./checkpiont", "error: no folder ./checkpiont, and no pipeline or model of this name; did you mean checkpoint?"),
    ],
)
def test_nothing_is_said_to_start_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, told: str) -> None:
    (tmp_path / "checkpoint").mkdir()
    monkeypatch.chdir(tmp_path)
    for command in (("ask", "Hi"), ("draw", "Hi"), ("chat",)):
        terminal = terminal_after(*command, "--model", named, size=(300, 24), code=1)
        error, hint = terminal.lines
        assert error == told and hint.startswith("hint: There are ")


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (None, "cannot read mine.yaml: No such file or directory"),
        ("name: x\nstages: 3\n", "mine.yaml: description: is missing; inputs: is missing; outputs: is missing; stages: must be a list"),
        ("name: x\n: : :\n", "mine.yaml: this is no YAML: line 2: expected <block end>, but found ':'"),
    ],
)
def test_a_file_of_a_pipeline_that_is_wrong_is_told_in_one_line(tmp_path: Path, written: str | None, told: str) -> None:
    if written is not None:
        (tmp_path / "mine.yaml").write_text(written)
    assert refusal("serve", "mine.yaml", folder=tmp_path) == [f"error: {told}"]


def test_who_asks_a_router_loads_nothing_of_a_stack(toy_address: str) -> None:
    """It would take a tenth of a second."""
    command = [sys.executable, "-X", "importtime", "-m", "omnistage.cli", "ask", "--text-only", "--address", toy_address, "Hi"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "omnistage.cli.make.speak" in loaded
    of_stacks = ("omnistage.router", "omnistage.stage", "omnistage.models.registry")
    assert [name for name in loaded if name.startswith(of_stacks)] == []
