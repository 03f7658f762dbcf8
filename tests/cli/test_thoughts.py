"""What is told beside an answer: a model's thoughts, and the servers' facts."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from helpers import lengths, servers
from helpers.command import omnistage
from helpers.output import object_of
from helpers.peer import PlayingPeer, answer, listening
from helpers.terminal import Terminal, words_of
from helpers.toy_pipeline import toy_pipeline
from omnistage.cli.make.figures import brief_figures, figures, remarks
from omnistage.cli.make.screen import DIM, PLAIN
from omnistage.client.events import Done
from omnistage.client.reader import Reader
from omnistage.models.toy import formulas
from omnistage.v1 import omni_pb2, stage_pb2

# Thoughts


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


# Facts of the servers


NOTE = "this model draws coloured shapes: circle, square, triangle, star, heart; this prompt names none of them"
STEERING = "你好\x1b[2J"


def answer_with(*reports: stage_pb2.Report) -> Sequence[omni_pb2.GenerateResponse]:
    """A whole answer, of which the stages report this."""
    events = list(answer(omni_pb2.GenerateRequest()))
    events[-1].usage.stages.extend(reports)
    return events


def thinker(drew: bool | None) -> stage_pb2.Report:
    """drew: None: an older stage, which does not say it."""
    return stage_pb2.Report(kind=stage_pb2.STAGE_KIND_THINKER, **({} if drew is None else {"drew": drew}))


def talker(words: str = "", count: int = 0, drew: bool = False) -> stage_pb2.Report:
    return stage_pb2.Report(kind=stage_pb2.STAGE_KIND_TALKER, unspoken=count, unspoken_words=words, drew=drew)


async def done_of(events: Sequence[omni_pb2.GenerateResponse]) -> Done:
    """As a client reads it."""

    async def messages() -> AsyncIterator[omni_pb2.GenerateResponse]:
        for message in events:
            yield message

    *_, done = [event async for event in Reader(time.perf_counter()).read(messages())]
    assert isinstance(done, Done)
    return done


@pytest.mark.parametrize(
    ("reports", "lines"),
    [
        ([thinker(False), talker("你好", 2)], ["not spoken: 你好 (2 characters)"]),
        ([thinker(False), talker("∯", 1)], ["not spoken: ∯ (1 character)"]),
        ([thinker(False), talker("你好 🙂", 3)], ["not spoken: 你好 🙂 (3 characters)"]),
        ([thinker(False), talker("字" * 64, 70)], [f"not spoken: {'字' * 64}... (70 characters)"]),
        ([stage_pb2.Report(kind=stage_pb2.STAGE_KIND_DIFFUSION, notes=[NOTE, "[b]another[/b]"])], [NOTE, "[b]another[/b]"]),
        ([thinker(False), talker()], []),
        ([], []),
    ],
)
async def test_what_is_told_stands_under_the_figures(reports: list[stage_pb2.Report], lines: list[str]) -> None:
    assert list(remarks(await done_of(answer_with(*reports)))) == lines


@pytest.mark.parametrize(
    ("reports", "drew"),
    [
        ([thinker(False), talker()], False),
        ([thinker(True), talker()], True),
        ([thinker(False), talker(drew=True)], True),
        ([thinker(None), talker()], None),
        ([thinker(None), talker(drew=True)], True),
        ([], None),
    ],
)
async def test_the_seed_is_shown_unless_none_was_drawn_with(reports: list[stage_pb2.Report], drew: bool | None) -> None:
    """A server that is older than this does not say; then the seed may have mattered."""
    done = await done_of(answer_with(*reports))
    assert done.drew is drew
    assert {"seed 7" in line for line in (figures(done), brief_figures(done))} == {drew is not False}


async def test_scripts_get_all_of_it() -> None:
    drawing = stage_pb2.Report(kind=stage_pb2.STAGE_KIND_DIFFUSION, notes=[NOTE], drew=True)
    events = answer_with(talker("你好", 2), drawing)
    async with listening(PlayingPeer(events, events)) as wire:
        for_scripts = await asyncio.to_thread(omnistage, "ask", "Hi", "--json", "--address", wire.address)
        for_people = await asyncio.to_thread(omnistage, "ask", "Hi", "--address", wire.address)
    result = object_of(for_scripts)
    names = ("seed", "drew", "unspoken", "unspoken_words", "notes")
    assert [result[name] for name in names] == [7, True, 2, "你好", [NOTE]]
    assert for_people.stderr.splitlines()[1:] == [NOTE, "not spoken: 你好 (2 characters)"]


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (40, 10)])
async def test_on_a_terminal_it_steers_nothing(columns: int, rows: int) -> None:
    terminal = Terminal(columns, rows)
    drawing = stage_pb2.Report(kind=stage_pb2.STAGE_KIND_DIFFUSION, notes=[NOTE])
    async with listening(PlayingPeer(answer_with(talker(STEERING, len(STEERING)), drawing))) as wire:
        assert await asyncio.to_thread(terminal.run, ("ask", "Hi", "--no-play", "--address", wire.address)) == 0
    shown = " ".join(words_of(terminal.lines))
    assert "not spoken: 你好\\x1b[2J (6 characters)" in shown
    assert NOTE in shown
    assert STEERING.encode() not in bytes(terminal.written)


async def test_a_conversation_tells_it_too(tmp_path: Path) -> None:
    async with listening(PlayingPeer(answer_with(thinker(False), talker("你好", 2)))) as wire:
        variables = {"OMNISTAGE_STATE": str(tmp_path), "OMNISTAGE_PLAYER": "none"}
        chat = partial(omnistage, "chat", "--address", wire.address, text="Hi\n", variables=variables)
        done = await asyncio.to_thread(chat)
    assert done.returncode == 0, done.stderr
    assert "not spoken: 你好 (2 characters)" in done.stderr.splitlines()
    assert "seed" not in done.stderr
