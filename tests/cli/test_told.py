"""The servers' facts about an answer beside its times, as people and scripts see them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from helpers.command import omnistage
from helpers.output import object_of
from helpers.peer import PlayingPeer, answer, listening
from helpers.terminal import Terminal, words_of
from omnistage.cli.make.figures import brief_figures, figures, remarks
from omnistage.client.events import Done
from omnistage.client.reader import Reader
from omnistage.v1 import omni_pb2, stage_pb2

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
