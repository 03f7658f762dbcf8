"""Everything that can be typed in `omnistage chat` beside questions of one line: files, another pipeline, several lines, and how the chat
shows them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.command import omnistage
from helpers.families import PICTURE, SOUND
from helpers.talking import ALT_ENTER, END, ENTER, PASTE, PASTED, PROMPT, alone_here, entry, talk
from helpers.terminal import words_of
from omnistage.cli.chat.lines import MentionedFile, find_files, find_named_file
from omnistage.cli.chat.talk import WORDS, help_lines
from omnistage.client import BadRequestError, Omni
from omnistage.models.toy import formulas
from omnistage.models.toy.files import png, wav

ROOT = Path(__file__).resolve().parents[2]
SIZES = pytest.mark.parametrize("size", [(80, 24), (40, 10)], ids=lambda size: f"{size[0]}x{size[1]}")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a router with a pipeline that sees and hears, one that does not, and one that only draws."""
    state = {"OMNISTAGE_STATE": str(tmp_path_factory.mktemp("state"))}
    done = omnistage("serve", "toy-omni", "toy", "toy-film", "--detach", "--no-http", "--address", "127.0.0.1:0", variables=state)
    assert done.returncode == 0, done.stderr
    try:
        there = done.stderr.split("serving on ")[1].split()[0]
        with Omni(address=there) as omni:
            omni.generate("Hi", pipeline="toy")  # It starts after the first one.
        yield there
    finally:
        assert omnistage("stop", variables=state).returncode == 0


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In this folder; nothing plays, and there was no conversation before."""
    alone_here(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cat.png").write_bytes(png(PICTURE))
    (tmp_path / "my cat.png").write_bytes(png(PICTURE[::-1]))
    (tmp_path / "question.wav").write_bytes(wav(SOUND, formulas.SAMPLE_RATE_HZ))
    (tmp_path / "clip.mp4").write_bytes(bytes(4) + b"ftypisom" + bytes(8))
    (tmp_path / "notes.txt").write_text("words")
    return tmp_path


def turns(folder: Path) -> list[dict[str, Any]]:
    kept: list[dict[str, Any]] = json.loads((folder / "state" / "chat.json").read_text())["turns"]
    return kept


def image(path: Path) -> dict[str, str]:
    return {"type": "image", "image": str(path)}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def test_files_go_with_the_next_message(address: str, files: Path) -> None:
    """Behind a word, dropped onto the terminal, or within a message; the model gets them as the client would send them."""
    cat, mine = files / "cat.png", files / "my cat.png"
    talk(
        *(address, *entry("/image cat.png", "with the next message: cat.png (picture)"), *entry("/audio question.wav What is this?")),
        *(*entry(f"'{mine}' ", "with the next message: my cat.png (picture)"), *entry("And this?")),
        *(*entry(f"Is ./cat.png like {files}/my\\ cat.png?"), *entry("question.wav", "question.wav (sound)"), *entry(""), *END),
        words=("--seed", "3", "--pipeline", "toy-omni"),
    )
    sound = {"type": "audio", "audio": str(files / "question.wav")}
    asked = [
        [image(cat), sound, text("What is this?")],
        [image(mine), text("And this?")],
        [image(cat), image(mine), text("Is cat.png like my cat.png?")],
        [sound],
    ]
    kept = turns(files)
    assert [turn["content"] for turn in kept[::2]] == asked
    with Omni(address=address) as omni:
        for number in range(1, len(kept), 2):
            assert omni.chat(kept[:number], seed=3, pipeline="toy-omni").text == kept[number]["content"]


def test_files_are_listed_dropped_and_refused(address: str, files: Path) -> None:
    """A refused file costs neither the conversation nor the next message."""
    terminal = talk(
        *(address, *entry("/image", "nothing goes with the next message; /image F gives a file")),
        *(*entry("/image nope.png", "cannot read nope.png"), *entry("/image notes.txt", "not a picture")),
        *(*entry("/video clip.mp4", "not video"), *entry("/image cat.png", "/image off leaves it out")),
        *(*entry("/audio", "with the next message: cat.png (picture)"), *entry("/image off", "nothing goes with the next message")),
        *(*entry("/tmp", "there is no /tmp"), *entry("./notes.txt"), *entry("/imege cat.png", "did you mean /image?")),
        *(*entry("/speed 9", "/speed 9: give X, 0.5 to 2"), (PROMPT, b"/bye" + ENTER)),
        words=("--seed", "3"),
    )
    assert [turn["content"] for turn in turns(files)[::2]] == ["./notes.txt"]
    assert "hint: /help shows what can be typed." in terminal.lines


def test_a_file_that_is_refused_costs_one_question(address: str, files: Path) -> None:
    """Only the refused one of several files is dropped; the refusal is printed, and no later message has the file."""
    (files / "broken.png").write_bytes(png(PICTURE)[:40])
    (files / "large.png").write_bytes(png(np.zeros((600, 600), np.uint8)))
    talk(
        *(address, *entry("/image broken.png What?", "broken.png: this is no whole PNG")),
        *(("left out: broken.png (picture); the question was: What?", b""), *entry("Hi")),
        *(*entry("./cat.png ./large.png and?", "large.png: send an 8-bit grey PNG"), ("left out: large.png", b"")),
        *(("with the next message: cat.png (picture)", b""), *entry("This"), *END),
        words=("--seed", "3"),
    )
    assert [turn["content"] for turn in turns(files)[::2]] == ["Hi", [image(files / "cat.png"), text("This")]]


def test_a_question_that_fails_by_itself_keeps_its_files(address: str, files: Path) -> None:
    talk(
        *(address, *entry("/image cat.png", "with the next message"), *entry("What?", "nobody"), ("with the next message: cat.png", b"")),
        *(*entry("/voice off", "voice: as usual"), *entry("What?"), *END),
        words=("--voice", "nobody"),
    )
    assert turns(files)[0]["content"] == [image(files / "cat.png"), text("What?")]


def test_a_pipeline_that_takes_no_pictures_goes_on_without_them(address: str, files: Path) -> None:
    again = (*entry("Again", "cat.png is no longer part of the conversation"), ("ttft", b""))
    steps = (*entry("./cat.png What?"), *entry("/model toy", "pipeline: toy"), *again, *END)
    talk(address, *steps, words=("--seed", "3", "--system", "Be brief."))
    assert turns(files)[0]["content"] == [text("[cat.png]"), text("What?")]


def test_a_pipeline_that_there_is_not_is_told_whatever_asks_for_it(address: str, files: Path) -> None:
    """And so is one that only draws; those are listed too."""
    said = "/image cat.png\n/voice toy\n/pipeline toy-film\n/pipeline\n/bye\n"
    done = omnistage("chat", "--pipeline", "absent", "--address", address, text=said)
    hint = "hint: toy-omni, toy answer here: /pipeline toy-omni, or /pipeline off to leave it to the router."
    absent = ["error: there is no pipeline absent", hint]
    *told, omni, toy, film = done.stderr.splitlines()
    assert told == [*absent, *absent, "error: toy-film only draws", hint]
    assert omni.startswith("toy-omni: takes text, image, audio, gives ")
    assert (toy, film) == ("toy: takes text, gives text, audio", "toy-film: only draws")


@pytest.mark.parametrize("word", ["/pipeline", "/model"])
def test_another_pipeline_goes_on_with_the_conversation(address: str, files: Path, word: str) -> None:
    talk(
        *(address, *entry("Hi"), *entry(f"{word} tyo", "did you mean toy?"), *entry(word, "toy-omni: takes text, image, audio")),
        *(("toy: takes text", b""), *entry(f"{word} toy", "pipeline: toy"), *entry(word, "(now)"), *entry("More")),
        *(*entry("/image cat.png", "toy takes text, not image"), ("/pipeline toy-omni takes it", b"")),
        *(*entry(f"{word} off", "as the router chooses"), *entry("And?"), *END),
        words=("--seed", "3"),
    )
    kept = turns(files)
    assert len(kept) == 6
    with Omni(address=address) as omni:
        for number, pipeline in ((1, "toy-omni"), (3, "toy"), (5, "toy-omni")):
            assert omni.chat(kept[:number], seed=3, pipeline=pipeline).text.split() == kept[number]["content"].split()


def test_several_lines_are_one_message(address: str, files: Path) -> None:
    """In a block, with Alt-Enter between, or pasted; a path within a block is text, and so is a word with a slash."""
    block = ENTER.join([b'"""', b"/image cat.png", b"./cat.png", b'"""'])
    talk(
        *(address, *entry(block), *entry(b"One" + ALT_ENTER + b"two"), *entry(PASTE + b"Three\rfour" + PASTED)),
        *(*entry('"""Five"""'), *END),
    )
    assert [turn["content"] for turn in turns(files)[::2]] == ["/image cat.png\n./cat.png", "One\ntwo", "Three\nfour", "Five"]


def test_a_block_in_a_pipe_is_one_message(address: str, files: Path) -> None:
    done = omnistage("chat", "--address", address, text='"""\nOne\n\ntwo"""\nThree\n"""never\nclosed')
    assert done.returncode == 0, done.stderr
    assert [turn["content"] for turn in turns(files)[::2]] == ["One\n\ntwo", "Three", "never\nclosed"]


@SIZES
def test_what_a_conversation_goes_on_with_is_shown(address: str, files: Path, size: tuple[int, int]) -> None:
    """The last turns, a line each; a file that is gone is told."""
    gone = files / "gone.png"
    gone.write_bytes(png(PICTURE))
    long = "And now a question that is longer than a line of any terminal " * 3
    talk(address, *entry("First"), *entry("/image gone.png What is on it?"), *entry(long), *END, words=("--seed", "3"))
    gone.unlink()
    terminal = talk(address, *entry("More"), *END, words=("--seed", "3", "--continue"), size=size)
    lines = terminal.lines
    begin = next(number for number, line in enumerate(lines) if line.startswith("> [gone.png] What is on it?"))
    assert " ".join(lines[:begin]).endswith("going on with the last conversation; /new begins anew")
    assert lines[begin + 2].startswith("> And now a question") and lines[begin + 2].endswith("…")
    assert all(len(line) < size[0] for line in lines)
    assert "gone.png is gone, and no longer part of the conversation" in " ".join(lines)
    assert turns(files)[2]["content"] == [text("[gone.png]"), text("What is on it?")]


@SIZES
def test_the_lines_of_the_program_are_broken_between_words(address: str, files: Path, size: tuple[int, int]) -> None:
    steps = (*entry("/help", "ends."), *entry("/image cat.png", "(picture)"), *entry("/pipeline", "toy-omni"))
    terminal = talk(address, *steps, (PROMPT, b"/quit" + ENTER), size=size)
    assert all(len(line) < size[0] for line in terminal.lines)
    shown = words_of(terminal.lines)
    told = ["with", "the", "next", "message:", "cat.png", "(picture);", "/image", "off", "leaves", "it", "out"]
    for words in (*(line.split() for line in help_lines(None)), told, ["toy:", "takes", "text,", "gives", "text,", "audio"]):
        assert any(shown[at : at + len(words)] == words for at in range(len(shown))), words


def test_the_help_and_the_docs_have_every_word() -> None:
    documented = (ROOT / "docs" / "command.md").read_text()
    for word in WORDS:
        assert any(word in line for line in help_lines(80))
        assert f"`{word}" in documented
    assert all(len(line) < columns for columns in (40, 80) for line in help_lines(columns))


def test_words_of_a_conversation_name_its_files(address: str, files: Path) -> None:
    steps = (*entry("/image cat.png What?"), *entry("/save talk.txt", "wrote"), *entry("/save talk.json", "wrote"))
    talk(address, *steps, *END, words=("--seed", "3"))
    assert (files / "talk.txt").read_text().startswith("You: [cat.png] What?\n\nAnswer: ")
    with Omni(address=address) as omni:
        conversation = json.loads((files / "talk.json").read_text())
        assert omni.chat(conversation[:1], seed=3).text == conversation[1]["content"]


@pytest.mark.parametrize(
    ("typed", "shown", "words"),
    [
        ("cat.png", ["cat.png"], ""),
        ('"my cat.png"', ["my cat.png"], ""),
        ("my\\ cat.png ", ["my cat.png"], ""),
        ("my cat.png", ["my cat.png"], ""),
        ("./cat.png What is this?", ["cat.png"], "What is this?"),
        ("What is on ./cat.png", ["cat.png"], "What is on"),
        ("What is on ./cat.png?", ["cat.png"], "What is on cat.png?"),
        ("Is ./cat.png like '{}/my cat.png', or not?", ["cat.png", "my cat.png"], "Is cat.png like my cat.png, or not?"),
        ("What is cat.png?", [], "What is cat.png?"),
        ("./notes.txt ./nope.png / ~ ~nobody/x.png .. 1/2", [], "./notes.txt ./nope.png / ~ ~nobody/x.png .. 1/2"),
        ("Don't look at ./cat.png, it's mine", ["cat.png"], "Don't look at cat.png, it's mine"),
        ("\0", [], "\0"),
        ("/" + "x" * 5000, [], "/" + "x" * 5000),
    ],
)
def test_paths_in_a_message(files: Path, typed: str, shown: list[str], words: str) -> None:
    found, left = find_files(typed.replace("{}", str(files)))
    assert ([Path(one.path).name for one in found], left) == (shown, words)


def test_paths_behind_a_word(files: Path) -> None:
    mine = MentionedFile("image", str(files / "my cat.png"))
    for typed in ("my cat.png What?", "'my cat.png' What?", "my\\ cat.png What?", f"{files}/my cat.png What?"):
        assert find_named_file("image", typed) == (mine, "What?")
    assert find_named_file("image", "cat.png") == (MentionedFile("image", str(files / "cat.png")), "")
    for typed in ("nope.png What?", "'nope.png' What?", "'", "\0", "question.wav"):
        with pytest.raises(BadRequestError):
            find_named_file("image", typed)
