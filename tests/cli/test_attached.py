"""Pictures, sounds and films that are typed with a question reach the model as they were typed; what cannot is told before anything is
started."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import servers
from helpers.command import omnistage
from helpers.families import PICTURE, SOUND
from helpers.output import COMMAND, object_of, refusal
from helpers.processes import StartedProcess
from helpers.terminal import CTRL_C, Terminal, terminal_after, words_of
from omnistage.cli.make.speak import Question
from omnistage.cli.options import Attached
from omnistage.cli.stack.pipelines import layout_for
from omnistage.client import Options, RequestError
from omnistage.client.request import for_conversation
from omnistage.models.toy import formulas
from omnistage.models.toy.files import png, wav


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """HOST:PORT of a router whose pipeline sees pictures, hears sound and speaks."""
    with servers.toy_address(tmp_path_factory.mktemp("omni"), "toy-omni", "--max-sessions", "8") as address:
        yield address


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    (folder / "cat.png").write_bytes(png(PICTURE))
    (folder / "dog.png").write_bytes(png(PICTURE[::-1]))
    (folder / "question.wav").write_bytes(wav(SOUND, formulas.SAMPLE_RATE_HZ))
    (folder / "clip.mp4").write_bytes(bytes(4) + b"ftypisom" + bytes(8))
    (folder / "empty.png").write_bytes(b"")
    (folder / "long.mp4").write_bytes(b"")
    os.truncate(folder / "long.mp4", 70 << 20)
    return folder


def said(*seen: formulas.Seen) -> str:
    items = formulas.items(seen)
    return "".join(formulas.word(formulas.omni_token(3, items, n)) for n in range(formulas.NATURAL_LENGTH))


MEDIA = ("--image", "dog.png", "--audio=question.wav", "--image", "cat.png")


def test_media_stand_before_the_words_in_the_order_given(address: str, files: Path) -> None:
    expected = said("u", PICTURE[::-1], SOUND, PICTURE, "What is this?")
    done = omnistage("ask", *MEDIA[:2], "What is this?", *MEDIA[2:], "--seed", "3", "--address", address, folder=files)
    assert (done.returncode, done.stdout) == (0, expected + "\n"), done.stderr
    assert expected != said("u", PICTURE[::-1], PICTURE, SOUND, "What is this?")


def test_a_question_may_be_a_sound_and_the_model_be_told_how_to_answer(address: str, files: Path) -> None:
    done = omnistage("ask", "--audio", "question.wav", "--system", "Be brief.", "--seed", "3", "--json", "--address", address, folder=files)
    assert object_of(done)["text"] == said("s", "Be brief.", "u", SOUND)


def test_standard_input_may_be_a_medium(address: str, files: Path) -> None:
    """Its type is told by its content."""
    common = ("--seed", "3", "--text-only", "--address", address)
    heard = omnistage("ask", "--audio", "-", "--image", "cat.png", "What?", *common, text=wav(SOUND, formulas.SAMPLE_RATE_HZ), folder=files)
    assert heard.stdout == said("u", SOUND, PICTURE, "What?") + "\n", heard.stderr
    for place in ("-", "/dev/stdin"):
        seen = omnistage("ask", "What?", "--image", place, *common, text=png(PICTURE))
        assert seen.stdout == said("u", PICTURE, "What?") + "\n", seen.stderr


@pytest.mark.parametrize(
    ("words", "text", "told"),
    [
        (("ask", "--audio", "-"), b"", "--audio: is empty"),
        (("ask", "--audio", "-"), png(PICTURE), "--audio: is image/png, not a sound"),
        (("ask", "--image", "-"), b"words", "--image: is of no known type"),
        (("draw", "A hill", "--image", "-", "--out", "x.png"), b"words", "--image: is of no known type"),
    ],
)
def test_a_wrong_input(words: tuple[str, ...], text: bytes, told: str, files: Path) -> None:
    assert told in " ".join(" ".join(refusal(*words, text=text, folder=files)).replace("│", " ").split())


def test_an_endless_pipe_is_too_much() -> None:
    with StartedProcess[bytes]([*COMMAND, "ask", "--image", "-"], stdin=subprocess.PIPE, stderr=subprocess.PIPE) as asking:
        assert asking.stdin is not None and asking.stderr is not None
        with pytest.raises(BrokenPipeError):
            while True:
                asking.stdin.write(bytes(1 << 20))
        assert asking.wait(60) == 1 and b"--image -: this is more than 64 MiB" in asking.stderr.read()


def test_a_terminal_is_no_recording() -> None:
    terminal = terminal_after("ask", "--audio", "-", size=(100, 24), code=1)
    assert "hint: Give a file or a pipe: arecord -f cd | omnistage ask --audio -" in terminal.lines


@pytest.mark.parametrize("size", [(80, 24), (40, 10)], ids=lambda size: f"{size[0]}x{size[1]}")
def test_ctrl_c_ends_a_recording_and_not_the_command(address: str, size: tuple[int, int]) -> None:
    """As it ends the recorder before the pipe: here the end that writes is closed, once the terminal has shown the key. It shows it when
    it has sent the signal, which may be a while after the key was pressed."""
    reading, writing = os.pipe()
    os.write(writing, wav(SOUND, formulas.SAMPLE_RATE_HZ))
    left, ends = [CTRL_C], [writing]

    def record(terminal: Terminal) -> None:
        if left and b"ends a recording" in b" ".join(terminal.written.split()):
            terminal.press(left.pop())
        if ends and b"^C" in terminal.written:
            os.close(ends.pop())

    terminal = Terminal(*size)
    words = ("ask", "--audio", "-", "--seed", "3", "--text-only", "--address", address)
    assert terminal.run(words, record, stdin=reading) == 0, terminal.lines
    os.close(reading)
    assert words_of(terminal.lines)[:3] == ["reading", "a", "sound"] and not left
    shown, expected = words_of(terminal.lines), said("u", SOUND).split()
    assert any(shown[at : at + len(expected)] == expected for at in range(len(shown)))
    assert all(len(line) < size[0] for line in terminal.lines)


@pytest.mark.parametrize(
    ("kind", "path", "told"),
    [
        ("image", "absent.png", "cannot read absent.png: No such file or directory"),
        ("image", ".", "cannot read .: Is a directory"),
        ("image", "empty.png", "empty.png is empty"),
        ("image", "question.wav", "question.wav is audio/wav, not a picture"),
        ("audio", "cat.png", "cat.png is image/png, not a sound"),
        ("image", "https://a.b/c.png", "https://a.b/c.png is a URL, and neither client nor servers fetch anything"),
    ],
)
def test_what_cannot_be_read_is_named(kind: str, path: str, told: str, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    question = Question("x", False, None, None, False, Options(), attached=[Attached("image", "cat.png"), Attached(kind, path)])
    with pytest.raises(RequestError) as caught:
        question.check()
    assert caught.value.message.startswith(f"--{kind}: {told}")


def test_a_film_that_is_larger_than_a_request_is_streamed(files: Path) -> None:
    question = Question("x", False, None, None, False, Options(), attached=[Attached("video", str(files / "long.mp4"), use_audio=True)])
    question.check()
    asked = for_conversation(question.conversation, Options())
    film, _ = asked.complete().thinker.messages[0].parts
    assert (film.port, film.use_audio, film.total_bytes, list(asked.uploads)) == ("media0", True, 70 << 20, ["media0"])


SEEING = " or ".join(f"{name}{end}" for name in ("qwen2_5_omni", "qwen3_omni") for end in ("", "-codes", "-text"))
"""Pipelines that take films."""
SILENT = "qwen2_5_omni-text gives text, not audio"


@pytest.mark.parametrize(
    ("pipeline", "inputs", "outputs", "told", "others"),
    [
        ("", ["text", "image"], [], "smol takes text, not image", f"{SEEING} or toy-omni"),
        ("toy-omni", ["text", "image", "video"], [], "toy-omni takes text, image, audio, not video", SEEING),
        ("qwen2_5_omni-text", ["text"], ["audio"], SILENT, "qwen2_5_omni or qwen3_omni or smol or toy or toy-omni"),
        ("qwen2_5_omni-text", ["text", "image"], ["text", "audio"], SILENT, "qwen2_5_omni or qwen3_omni or toy-omni"),
    ],
)
def test_pipelines_that_can_are_named_and_none_is_started(
    pipeline: str, inputs: list[str], outputs: list[str], told: str, others: str
) -> None:
    with pytest.raises(RequestError) as caught:
        layout_for(pipeline, inputs, outputs)
    assert (caught.value.message, caught.value.hint) == (told, f"Give another --pipeline: {others}.")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("ask", "x", "--image", "absent.png"), "error: --image: cannot read absent.png: No such file or directory"),
        (("ask", "x", "--image", "cat.png"), "error: smol takes text, not image"),
        (("ask", "x", "--out", "x.wav", "--pipeline", "qwen2_5_omni-text"), f"error: {SILENT}"),
        (("say", "x", "--pipeline", "qwen2_5_omni-text"), f"error: {SILENT}"),
    ],
)
def test_what_cannot_be_asked_is_a_line_and_a_hint_where_there_is_more_to_say(words: tuple[str, ...], told: str, files: Path) -> None:
    error, *hint = refusal(*words, folder=files)
    assert error == told and [line[:6] for line in hint] == ([] if "--image" in told else ["hint: "])
    assert not (files / "x.wav").exists()


def test_a_film_that_a_running_pipeline_does_not_take(address: str, files: Path) -> None:
    error, *_ = refusal("ask", "x", "--video", "clip.mp4", "--video-sound", "--address", address, folder=files)
    assert error.startswith("error: --video: clip.mp4: ") and "takes text, image and audio, not 'video/mp4'" in error
