"""A model's thoughts before its answer: dim on a terminal, above the answer, and in no pipe."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import lengths, servers
from helpers.command import omnistage
from helpers.terminal import Terminal, words_of
from helpers.toy_pipeline import toy_pipeline
from omnistage.cli.make.screen import DIM, PLAIN
from omnistage.models.toy import formulas

THINKS = 6
WORDS = formulas.text(1, "Hi", 24).split()
ASKED = ("ask", "Hi", "--seed", "1", "--address")


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """HOST:PORT of a router in front of a Thinker that thinks."""
    folder = tmp_path_factory.mktemp("thinking")
    with servers.toy_address(folder, toy_pipeline(folder, thinks=THINKS), "--max-sessions", "4") as address:
        yield address


def test_a_terminal_shows_it_dim_above_the_answer(thinking: str) -> None:
    terminal = Terminal(20, 24)
    assert terminal.run((*ASKED, thinking)) == 0
    dim = [part.partition(PLAIN)[0] for part in terminal.written.decode().split(DIM)[1:]]
    assert list(dict.fromkeys(word for word in words_of(dim) if word in WORDS)) == WORDS[:THINKS]
    first = next(number for number, line in enumerate(terminal.lines) if line.split()[:1] == [WORDS[THINKS]])
    assert words_of(terminal.lines[:first]) == WORDS[:THINKS]
    assert words_of(terminal.lines[first:])[: 24 - THINKS] == WORDS[THINKS:]


def test_a_pipe_gets_the_answer_alone(thinking: str) -> None:
    done = omnistage(*ASKED, thinking)
    assert (done.returncode, done.stdout.split()) == (0, WORDS[THINKS:])
    assert not set(WORDS[:THINKS]) & set(done.stderr.split()) and "still thinking" not in done.stderr


def test_scripts_get_it_by_its_name(thinking: str) -> None:
    told = json.loads(omnistage(*ASKED, thinking, "--json").stdout)
    assert (told["text"].split(), told["thought"].split()) == (WORDS[THINKS:], WORDS[:THINKS])


def test_what_is_cut_within_it_says_so(thinking: str) -> None:
    done = omnistage(*ASKED, thinking, "--max-tokens", "4")
    assert (done.stdout, done.returncode) == ("", 0)
    assert "cut at 4 tokens while it was still thinking: there is no answer yet; --max-tokens N lets it say more" in done.stderr


def test_what_ends_within_it_by_itself_says_so(tmp_path: Path) -> None:
    with servers.toy_address(tmp_path, toy_pipeline(tmp_path, length=4, thinks=THINKS)) as address:
        done = omnistage(*ASKED, address)
        told = json.loads(omnistage(*ASKED, address, "--json").stdout)
    assert (done.stdout, done.returncode, told["finish_reason"], told["text"]) == ("", 0, "stop", "")
    assert "ended while it was still thinking: there is no answer yet\n" in done.stderr


@lengths.long_form(
    "cli/test_thoughts.py::test_a_pipe_gets_the_answer_alone", "cli/test_terminal.py::test_an_answer_that_was_cut_says_so_and_what_to_do"
)
def test_a_whole_answer_says_nothing_of_it(thinking: str) -> None:
    cut = omnistage(*ASKED, thinking, "--max-tokens", "8").stderr
    assert "cut at 8 tokens; --max-tokens N" in cut
    assert not any("still thinking" in told for told in (cut, omnistage(*ASKED, thinking).stderr))
