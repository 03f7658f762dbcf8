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
from helpers.talking import ALT_ENTER, CTRL_D, ENTER, PASTE, PASTED, PROMPT, alone_here, talk
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
        *(address, (PROMPT, b"/image cat.png" + ENTER), ("with the next message: cat.png (picture)", b"")),
        *((PROMPT, b"/audio question.wav What is this?" + ENTER), ("ttft", b"")),
        *((PROMPT, f"'{mine}' ".encode() + ENTER), ("with the next message: my cat.png (picture)", b"")),
        *((PROMPT, b"And this?" + ENTER), ("ttft", b"")),
        *((PROMPT, f"Is ./cat.png like {files}/my\\ cat.png?".encode() + ENTER), ("ttft", b"")),
        *((PROMPT, b"question.wav" + ENTER), ("question.wav (sound)", b""), (PROMPT, ENTER), ("ttft", b""), (PROMPT, CTRL_D)),
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
        *(address, (PROMPT, b"/image" + ENTER), ("nothing goes with the next message; /image F gives a file", b"")),
        *((PROMPT, b"/image nope.png" + ENTER), ("cannot read nope.png", b"")),
        *((PROMPT, b"/image notes.txt" + ENTER), ("not a picture", b"")),
        *((PROMPT, b"/video clip.mp4" + ENTER), ("not video", b"")),
        *((PROMPT, b"/image cat.png" + ENTER), ("/image off leaves it out", b"")),
        *((PROMPT, b"/audio" + ENTER), ("with the next message: cat.png (picture)", b"")),
        *((PROMPT, b"/image off" + ENTER), ("nothing goes with the next message", b"")),
        *((PROMPT, b"/tmp" + ENTER), ("there is no /tmp", b""), (PROMPT, b"./notes.txt" + ENTER), ("ttft", b"")),
        *(
            (PROMPT, b"/imege cat.png" + ENTER),
            ("did you mean /image?", b""),
            (PROMPT, b"/speed 9" + ENTER),
            ("/speed 9: give X, 0.5 to 2", b""),
            (PROMPT, b"/bye" + ENTER),
        ),
        words=("--seed", "3"),
    )
    assert [turn["content"] for turn in turns(files)[::2]] == ["./notes.txt"]
    assert "hint: /help shows what can be typed." in terminal.lines


def test_a_file_that_is_refused_costs_one_question(address: str, files: Path) -> None:
    """Only the refused one of several files is dropped; the refusal is printed, and no later message has the file."""
    (files / "broken.png").write_bytes(png(PICTURE)[:40])
    (files / "large.png").write_bytes(png(np.zeros((600, 600), np.uint8)))
    talk(
        *(address, (PROMPT, b"/image broken.png What?" + ENTER), ("broken.png: this is no whole PNG", b"")),
        *(("left out: broken.png (picture); the question was: What?", b""), (PROMPT, b"Hi" + ENTER), ("ttft", b"")),
        *((PROMPT, b"./cat.png ./large.png and?" + ENTER), ("large.png: send an 8-bit grey PNG", b"")),
        *(("left out: large.png", b""), ("with the next message: cat.png (picture)", b"")),
        *((PROMPT, b"This" + ENTER), ("ttft", b""), (PROMPT, CTRL_D)),
        words=("--seed", "3"),
    )
    assert [turn["content"] for turn in turns(files)[::2]] == ["Hi", [image(files / "cat.png"), text("This")]]


def test_a_question_that_fails_by_itself_keeps_its_files(address: str, files: Path) -> None:
    talk(
        *(address, (PROMPT, b"/image cat.png" + ENTER), ("with the next message", b""), (PROMPT, b"What?" + ENTER), ("nobody", b"")),
        *(("with the next message: cat.png", b""), (PROMPT, b"/voice off" + ENTER), ("voice: as usual", b"")),
        *((PROMPT, b"What?" + ENTER), ("ttft", b""), (PROMPT, CTRL_D)),
        words=("--voice", "nobody"),
    )
    assert turns(files)[0]["content"] == [image(files / "cat.png"), text("What?")]


def test_a_pipeline_that_takes_no_pictures_goes_on_without_them(address: str, files: Path) -> None:
    talk(
        *(address, (PROMPT, b"./cat.png What?" + ENTER), ("ttft", b""), (PROMPT, b"/model toy" + ENTER), ("pipeline: toy", b"")),
        *((PROMPT, b"Again" + ENTER), ("cat.png is no longer part of the conversation", b""), ("ttft", b""), (PROMPT, CTRL_D)),
        words=("--seed", "3", "--system", "Be brief."),
    )
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
    typed = word.encode()
    talk(
        *(address, (PROMPT, b"Hi" + ENTER), ("ttft", b""), (PROMPT, typed + b" tyo" + ENTER), ("did you mean toy?", b"")),
        *((PROMPT, typed + ENTER), ("toy-omni: takes text, image, audio", b""), ("toy: takes text", b"")),
        *((PROMPT, typed + b" toy" + ENTER), ("pipeline: toy", b""), (PROMPT, typed + ENTER), ("(now)", b"")),
        *(
            (PROMPT, b"More" + ENTER),
            ("ttft", b""),
            (PROMPT, b"/image cat.png" + ENTER),
            ("toy takes text, not image", b""),
            ("/pipeline toy-omni takes it", b""),
        ),
        *((PROMPT, typed + b" off" + ENTER), ("as the router chooses", b"")),
        *((PROMPT, b"And?" + ENTER), ("ttft", b""), (PROMPT, CTRL_D)),
        words=("--seed", "3"),
    )
    kept = turns(files)
    assert len(kept) == 6
    with Omni(address=address) as omni:
        for number, pipeline in ((1, "toy-omni"), (3, "toy"), (5, "toy-omni")):
            assert omni.chat(kept[:number], seed=3, pipeline=pipeline).text.split() == kept[number]["content"].split()


def test_several_lines_are_one_message(address: str, files: Path) -> None:
    """In a block, with Alt-Enter between, or pasted; a path within a block is text, and so is a word with a slash."""
    block = b'"""' + ENTER + b"/image cat.png" + ENTER + b"./cat.png" + ENTER + b'"""' + ENTER
    talk(
        *(address, (PROMPT, block), ("ttft", b""), (PROMPT, b"One" + ALT_ENTER + b"two" + ENTER), ("ttft", b"")),
        *((PROMPT, PASTE + b"Three\rfour" + PASTED + ENTER), ("ttft", b""), (PROMPT, b'"""Five"""' + ENTER), ("ttft", b"")),
        *((PROMPT, CTRL_D),),
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
    talk(
        *(address, (PROMPT, b"First" + ENTER), ("ttft", b""), (PROMPT, b"/image gone.png What is on it?" + ENTER), ("ttft", b"")),
        *((PROMPT, b"And now a question that is longer than a line of any terminal " * 3 + ENTER), ("ttft", b""), (PROMPT, CTRL_D)),
        words=("--seed", "3"),
    )
    gone.unlink()
    terminal = talk(*(address, (PROMPT, b"More" + ENTER), ("ttft", b""), (PROMPT, CTRL_D)), words=("--seed", "3", "--continue"), size=size)
    lines = terminal.lines
    begin = next(number for number, line in enumerate(lines) if line.startswith("> [gone.png] What is on it?"))
    assert " ".join(lines[:begin]).endswith("going on with the last conversation; /new begins anew")
    assert lines[begin + 2].startswith("> And now a question") and lines[begin + 2].endswith("…")
    assert all(len(line) < size[0] for line in lines)
    assert "gone.png is gone, and no longer part of the conversation" in " ".join(lines)
    assert turns(files)[2]["content"] == [text("[gone.png]"), text("What is on it?")]


@SIZES
def test_the_lines_of_the_program_are_broken_between_words(address: str, files: Path, size: tuple[int, int]) -> None:
    terminal = talk(
        *(address, (PROMPT, b"/help" + ENTER), ("ends.", b""), (PROMPT, b"/image cat.png" + ENTER), ("(picture)", b"")),
        *((PROMPT, b"/pipeline" + ENTER), ("toy-omni", b""), (PROMPT, b"/quit" + ENTER)),
        size=size,
    )
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
    talk(
        *(address, (PROMPT, b"/image cat.png What?" + ENTER), ("ttft", b""), (PROMPT, b"/save talk.txt" + ENTER), ("wrote", b"")),
        *((PROMPT, b"/save talk.json" + ENTER), ("wrote", b""), (PROMPT, CTRL_D)),
        words=("--seed", "3"),
    )
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
