"""`omnistage chat` on a real terminal and in a pipe: answers are shown and heard, and broken off by a key."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from helpers import lengths, servers
from helpers.command import omnistage
from helpers.processes import StartedProcess
from helpers.sink import Sink
from helpers.talking import END, ENTER, PROMPT, alone_here, entry, talk
from helpers.terminal import CTRL_C, words_of
from helpers.toy_pipeline import toy_pipeline
from omnistage.client import Omni
from omnistage.models.toy import formulas

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


def test_nothing_to_go_on_with_is_told(toy_address: str, alone: Path) -> None:
    terminal = talk(toy_address, words=("--continue",), exit_code=1)
    assert "there is no conversation to go on with" in " ".join(terminal.lines)


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
    terminal = talk(
        *(
            toy_address,
            *entry("/spede 2", "there is no /spede"),
            *entry("/save", "needs the name"),
            *entry("/save x.wav", "there is no sound"),
        ),
        *(*entry("/voice nobody", "The only voice is toy."), *entry("/voice toy", "voice: toy"), *entry("/voice off", "as usual")),
        *(*entry("Hi"), *entry(f"/save {text}", "wrote"), *entry("/new", "a new conversation"), *entry("/help", "/max-tokens"), *END),
        words=("--seed", "1"),
    )
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


def test_a_broken_conversation_is_told(toy_address: str, alone: Path) -> None:
    alone.mkdir()
    for text in ("{", "[]", '{"settings": {}}', '{"settings": {}, "turns": [{"role": "user"}]}'):
        (alone / "chat.json").write_text(text)
        terminal = talk(toy_address, words=("--continue",), exit_code=1)
        assert "cannot be read" in " ".join(terminal.lines)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_chat_that_waits_for_a_pipe_can_be_ended(toy_address: str, alone: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "omnistage.cli", "chat", "--address", toy_address]
    with StartedProcess(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as chatting:
        assert chatting.stdin is not None and chatting.stderr is not None
        chatting.stdin.write("Hi\n")
        chatting.stdin.flush()
        assert chatting.stderr.readline().startswith("ttft")
        chatting.send_signal(number)
        assert chatting.wait(60) == 128 + number
        assert "Traceback" not in chatting.stderr.read()


def test_a_chat_without_standard_input_is_over(toy_address: str, alone: Path) -> None:
    command = ["sh", "-c", 'exec "$@" <&-', "sh", sys.executable, "-m", "omnistage.cli", "chat", "--address", toy_address]
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
    assert audio is not None
    assert np.array_equal(sink.samples(), audio.samples)


def test_ctrl_c_twice_at_once_stops_the_answer_alone(slow_address: str, alone: Path) -> None:
    steps = ((PROMPT, b"Hi" + ENTER), ("speaking", CTRL_C + CTRL_C), ("stopped", b""))
    for _ in range(3):
        talk(slow_address, *steps, *END, words=("--max-tokens", "4000"))


def test_a_pipeline_without_a_voice_is_talked_to_in_text(tmp_path: Path, alone: Path) -> None:
    """Where it is started for the talk too: it is asked for what it gives."""
    done = omnistage("chat", "--seed", "1", "--pipeline", toy_pipeline(tmp_path), text="Hi\n")
    assert (done.returncode, done.stdout.split()) == (0, expected(1, "Hi"))
