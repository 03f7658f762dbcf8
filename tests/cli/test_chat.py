"""`omnistage chat` on a real terminal and in a pipe: answers are shown, heard, and broken off by a key; and all that can be typed."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from helpers import lengths, servers
from helpers.command import omnistage
from helpers.families import PICTURE, SOUND
from helpers.output import COMMAND
from helpers.processes import StartedProcess
from helpers.sink import Sink
from helpers.talking import ALT_ENTER, END, ENTER, PASTE, PASTED, PROMPT, alone_here, entry, talk
from helpers.terminal import CTRL_C, words_of
from helpers.toy_pipeline import toy_pipeline
from omnistage.cli.chat.lines import MentionedFile, find_files, find_named_file
from omnistage.cli.chat.talk import WORDS, help_lines
from omnistage.client import BadRequestError, Omni
from omnistage.models.toy import formulas
from omnistage.models.toy.files import png, wav

UP = b"\x1b[A"


@pytest.fixture(scope="module")
def slow_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a router whose answers take as long as `max_tokens` says, 20 tokens and a second of sound in each."""
    folder = tmp_path_factory.mktemp("slow")
    with servers.toy_address(folder, toy_pipeline(folder, interval_s=0.05, samples_per_frame=1200)) as address:
        yield address


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing plays, and there was no conversation before."""
    return alone_here(tmp_path, monkeypatch)


def turns(state: Path) -> list[dict[str, Any]]:
    """The turns of the conversation that is kept in a folder."""
    conversation: dict[str, list[dict[str, Any]]] = json.loads((state / "chat.json").read_text())
    return conversation["turns"]


def expected(seed: int, text: str, tokens: int = formulas.NATURAL_LENGTH) -> list[str]:
    return formulas.text(seed, text, tokens).split()


def test_questions_are_answered_one_after_the_other(toy_address: str, alone: Path) -> None:
    terminal = talk(toy_address, *entry("Hi"), *entry("/seed 4", "seed: 4"), (PROMPT, b"/quit" + ENTER), words=("--seed", "1"))
    assert set(expected(1, "Hi")) <= set(words_of(terminal.lines))
    question, answer = turns(alone)
    assert (question["role"], answer["role"], answer["content"].split()) == ("user", "assistant", expected(1, "Hi"))
    assert all((alone / name).stat().st_mode & 0o077 == 0 for name in ("chat.json", "chat-lines"))


@lengths.drawn_cells(1, "key", [ENTER, CTRL_C], ids=["enter", "ctrl-c"])
def test_a_key_stops_the_answer_and_not_the_program(slow_address: str, alone: Path, key: bytes) -> None:
    hello, more = ((step, ("speaking", key), ("stopped", b"")) for step, _ in (entry("Hi"), entry("More")))
    terminal = talk(slow_address, *hello, *more, *END, words=("--seed", "1", "--max-tokens", "4000"))
    assert [turn["role"] for turn in turns(alone)] == ["user", "assistant"] * 2
    # The part of the answer that came is in the conversation, and it is the beginning of the answer.
    part = turns(alone)[1]["content"].split()
    assert 0 < len(part) < 4000 and expected(1, "Hi", 4000)[: len(part) - 1] == part[:-1]
    assert terminal.written.count(b"stopped") == 2


def test_what_is_typed_meanwhile_is_the_next_question(slow_address: str, alone: Path) -> None:
    steps = ((PROMPT, b"Hi" + ENTER), ("speaking", b"Mo" + ENTER), ("stopped", b""), (PROMPT, b"re" + ENTER), ("speaking", ENTER))
    talk(slow_address, *steps, ("stopped", b""), *END, words=("--max-tokens", "4000"))
    assert turns(alone)[2]["content"] == "More"


def test_what_was_typed_and_said_is_there_after_a_restart(toy_address: str, alone: Path) -> None:
    talk(toy_address, *entry("Hi there"), *END, words=("--seed", "1"))
    talk(toy_address, *entry(UP), *END, words=("--seed", "1"))
    assert [turn["content"] for turn in turns(alone)[::2]] == ["Hi there"]
    talk(toy_address, *entry("And now?"), *END, words=("--continue",))
    assert [turn["content"] for turn in turns(alone)[::2]] == ["Hi there", "And now?"]


def test_ctrl_c_at_the_prompt_ends_nothing(toy_address: str, alone: Path) -> None:
    talk(toy_address, (PROMPT, b"half a" + CTRL_C), ("Ctrl-D or /quit ends", b""), *entry("Hi"), *END)


def test_an_answer_is_heard_and_broken_off(slow_address: str, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sample once, and none behind the key."""
    sink = Sink(tmp_path / "sink")
    monkeypatch.setenv("OMNISTAGE_PLAYER", sink.variable)
    wav = tmp_path / "said.wav"
    steps = (*entry("Hi", "speaking"), ("ttft", b""), *entry(f"/save {wav}", "wrote"), *END)
    talk(slow_address, *steps, words=("--seed", "1", "--max-tokens", "24"))
    whole, rate_hz = soundfile.read(wav, dtype="float32")
    heard = sink.samples()
    assert rate_hz == 24000 and 0 < len(heard) <= len(whole)
    assert np.array_equal(heard, whole[: len(heard)])


def test_a_wrong_word_is_told_and_the_next_one_works(toy_address: str, alone: Path, tmp_path: Path) -> None:
    text = tmp_path / "talk.txt"
    steps = [*entry("/spede 2", "there is no /spede"), *entry("/save", "needs the name"), *entry("/save x.wav", "there is no sound")]
    steps += [*entry("/voice nobody", "The only voice is toy."), *entry("/voice toy", "voice: toy"), *entry("/voice off", "as usual")]
    steps += [*entry("Hi"), *entry(f"/save {text}", "wrote"), *entry("/new", "a new conversation"), *entry("/help", "/max-tokens")]
    terminal = talk(toy_address, *steps, *END, words=("--seed", "1"))
    assert "Enter or Ctrl-C stops an answer" in " ".join(terminal.lines)
    assert text.read_text().startswith("You: Hi\n\nAnswer: ")


def test_the_lines_of_a_pipe_are_questions(toy_address: str, alone: Path) -> None:
    done = omnistage("chat", "--address", toy_address, "--seed", "1", text="Hi\n\n/nope\nAnd?\n")
    assert done.returncode == 1, "one of them failed"
    first, *others = done.stdout.splitlines()
    assert first.split() == expected(1, "Hi") and others
    assert "there is no /nope" in done.stderr
    assert len(turns(alone)) == 4


def test_a_state_that_cannot_be_kept_costs_no_answer(toy_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNISTAGE_PLAYER", "none")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OMNISTAGE_STATE", str(tmp_path / "file" / "state"))
    terminal = talk(toy_address, *entry("Hi"), *END)
    assert "cannot be kept" in " ".join(terminal.lines)


def test_a_conversation_that_is_broken_or_not_there_is_told(toy_address: str, alone: Path) -> None:
    alone.mkdir()
    for text in (None, "{", "[]", '{"settings": {}}', '{"settings": {}, "turns": [{"role": "user"}]}'):
        if text is not None:
            (alone / "chat.json").write_text(text)
        terminal = talk(toy_address, words=("--continue",), exit_code=1)
        told = "there is no conversation to go on with" if text is None else "cannot be read"
        assert told in " ".join(terminal.lines)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_chat_that_waits_for_a_pipe_can_be_ended(toy_address: str, alone: Path, number: signal.Signals) -> None:
    command = [*COMMAND, "chat", "--address", toy_address]
    with StartedProcess(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as chatting:
        assert chatting.stdin is not None and chatting.stderr is not None
        chatting.stdin.write("Hi\n")
        chatting.stdin.flush()
        assert chatting.stderr.readline().startswith("ttft")
        chatting.send_signal(number)
        assert chatting.wait(60) == 128 + number and "Traceback" not in chatting.stderr.read()


def test_a_chat_without_standard_input_is_over(toy_address: str, alone: Path) -> None:
    command = ["sh", "-c", 'exec "$@" <&-', "sh", *COMMAND, "chat", "--address", toy_address]
    done = subprocess.run(command, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


def test_every_answer_of_a_pipe_is_heard_to_its_end(toy_address: str, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is there to choose between one answer and the next."""
    sink = Sink(tmp_path / "sink", speed=0)
    monkeypatch.setenv("OMNISTAGE_PLAYER", sink.variable)
    done = omnistage("chat", "--address", toy_address, "--seed", "1", text="Hi\n")
    assert done.returncode == 0, done.stderr
    with Omni(address=toy_address) as omni:
        audio = omni.generate("Hi", seed=1).audio
    assert audio is not None and np.array_equal(sink.samples(), audio.samples)


def test_ctrl_c_twice_at_once_stops_the_answer_alone(slow_address: str, alone: Path) -> None:
    steps = ((PROMPT, b"Hi" + ENTER), ("speaking", CTRL_C + CTRL_C), ("stopped", b""))
    for _ in range(3):
        talk(slow_address, *steps, *END, words=("--max-tokens", "4000"))


def test_a_pipeline_without_a_voice_is_talked_to_in_text(tmp_path: Path, alone: Path) -> None:
    """Where it is started for the talk too: it is asked for what it gives."""
    done = omnistage("chat", "--seed", "1", "--pipeline", toy_pipeline(tmp_path), text="Hi\n")
    assert (done.returncode, done.stdout.split()) == (0, expected(1, "Hi"))


# All that can be typed beside questions of one line


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
    kept = turns(files / "state")
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
    assert [turn["content"] for turn in turns(files / "state")[::2]] == ["./notes.txt"]
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
    assert [turn["content"] for turn in turns(files / "state")[::2]] == ["Hi", [image(files / "cat.png"), text("This")]]


def test_a_question_that_fails_by_itself_keeps_its_files(address: str, files: Path) -> None:
    talk(
        *(address, *entry("/image cat.png", "with the next message"), *entry("What?", "nobody"), ("with the next message: cat.png", b"")),
        *(*entry("/voice off", "voice: as usual"), *entry("What?"), *END),
        words=("--voice", "nobody"),
    )
    assert turns(files / "state")[0]["content"] == [image(files / "cat.png"), text("What?")]


def test_a_pipeline_that_takes_no_pictures_goes_on_without_them(address: str, files: Path) -> None:
    again = (*entry("Again", "cat.png is no longer part of the conversation"), ("ttft", b""))
    steps = (*entry("./cat.png What?"), *entry("/model toy", "pipeline: toy"), *again, *END)
    talk(address, *steps, words=("--seed", "3", "--system", "Be brief."))
    assert turns(files / "state")[0]["content"] == [text("[cat.png]"), text("What?")]


def test_a_pipeline_that_there_is_not_is_told_whatever_asks_for_it(address: str, files: Path) -> None:
    """And so is one that only draws; those are listed too."""
    said = "/image cat.png\n/voice toy\n/pipeline toy-film\n/pipeline\n/bye\n"
    done = omnistage("chat", "--pipeline", "absent", "--address", address, text=said)
    hint = "hint: toy-omni, toy answer here: /pipeline toy-omni, or /pipeline off to leave it to the router."
    absent = ["error: there is no pipeline absent", hint]
    *told, omni, toy, film = done.stderr.splitlines()
    assert told == [*absent, *absent, "error: toy-film only draws", hint]
    assert omni.startswith("toy-omni, toy-omni-thinker: takes text, image, audio, gives ")
    assert (toy, film) == ("toy, toy-thinker: takes text, gives text, audio", "toy-film: only draws")


@pytest.mark.parametrize("word", ["/pipeline", "/model"])
def test_another_pipeline_goes_on_with_the_conversation(address: str, files: Path, word: str) -> None:
    talk(
        *(address, *entry("Hi"), *entry(f"{word} tyo", "did you mean toy?"), *entry(word, "toy-omni-thinker: takes text, image, audio")),
        *(("toy-thinker: takes text", b""), *entry(f"{word} TOY-thinker", "pipeline: toy"), *entry(word, "(now)"), *entry("More")),
        *(*entry("/image cat.png", "toy takes text, not image"), ("/pipeline toy-omni takes it", b"")),
        *(*entry(f"{word} off", "as the router chooses"), *entry("And?"), *END),
        words=("--seed", "3"),
    )
    kept = turns(files / "state")
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
    assert [turn["content"] for turn in turns(files / "state")[::2]] == ["/image cat.png\n./cat.png", "One\ntwo", "Three\nfour", "Five"]


def test_a_block_in_a_pipe_is_one_message(address: str, files: Path) -> None:
    done = omnistage("chat", "--address", address, text='"""\nOne\n\ntwo"""\nThree\n"""never\nclosed')
    assert done.returncode == 0, done.stderr
    assert [turn["content"] for turn in turns(files / "state")[::2]] == ["One\n\ntwo", "Three", "never\nclosed"]


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
    assert turns(files / "state")[2]["content"] == [text("[gone.png]"), text("What is on it?")]


@SIZES
def test_the_lines_of_the_program_are_broken_between_words(address: str, files: Path, size: tuple[int, int]) -> None:
    steps = (*entry("/help", "ends."), *entry("/image cat.png", "(picture)"), *entry("/pipeline", "toy-omni"))
    terminal = talk(address, *steps, (PROMPT, b"/quit" + ENTER), size=size)
    assert all(len(line) < size[0] for line in terminal.lines)
    shown = words_of(terminal.lines)
    told = ["with", "the", "next", "message:", "cat.png", "(picture);", "/image", "off", "leaves", "it", "out"]
    for words in (*(line.split() for line in help_lines(None)), told, ["toy-thinker:", "takes", "text,", "gives", "text,", "audio"]):
        assert any(shown[at : at + len(words)] == words for at in range(len(shown))), words


def test_the_help_and_the_docs_have_every_word() -> None:
    documented = (ROOT / "docs" / "command.md").read_text()
    for word in WORDS:
        assert any(word in line for line in help_lines(80)) and f"`{word}" in documented
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
