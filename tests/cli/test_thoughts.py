"""Everything beside an answer: thoughts, facts of the servers, the picture of its times, captions."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import lengths, servers
from helpers.command import omnistage
from helpers.output import object_of, refusal
from helpers.peer import PlayingPeer, answer, listening
from helpers.terminal import Terminal, terminal_after, words_of
from helpers.toy_pipeline import toy_pipeline
from omnistage.cli.make.figures import figures, remarks, sentence, waited_s
from omnistage.cli.make.screen import DIM, PLAIN
from omnistage.cli.make.speak import MAX_CHARACTERS, captions, write_captions
from omnistage.cli.timeline import draw, opened_at
from omnistage.client.events import AudioArrival, Done, Failover, SpokenWord, StageReport, TextArrival, Timing, Usage
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
    terminal = terminal_after(*ASKED, thinking, size=(20, 24))
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


# Facts of the servers


NOTE = "this model draws coloured shapes: circle, square, triangle, star, heart; this prompt names none of them"
STEERING = "你好\x1b[2J"


def answer_with(*reports: stage_pb2.Report) -> Sequence[omni_pb2.GenerateResponse]:
    """A whole answer, of which the stages report this."""
    events = list(answer(omni_pb2.GenerateRequest()))
    events[-1].usage.stages.extend(reports)
    return events


OLD_THINKER = stage_pb2.Report(kind=stage_pb2.STAGE_KIND_THINKER)
"""It does not say whether it drew."""


def thinker(drew: bool) -> stage_pb2.Report:
    return stage_pb2.Report(kind=stage_pb2.STAGE_KIND_THINKER, drew=drew)


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
        ([OLD_THINKER, talker()], None),
        ([OLD_THINKER, talker(drew=True)], True),
        ([], None),
    ],
)
async def test_the_seed_is_shown_unless_none_was_drawn_with(reports: list[stage_pb2.Report], drew: bool | None) -> None:
    """A server that is older than this does not say; then the seed may have mattered."""
    done = await done_of(answer_with(*reports))
    assert done.drew is drew
    assert {"seed 7" in line for line in (figures(done), figures(done, is_brief=True))} == {drew is not False}


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
    assert "not spoken: 你好\\x1b[2J (6 characters)" in shown and NOTE in shown
    assert STEERING.encode() not in bytes(terminal.written)


async def test_a_conversation_tells_it_too(tmp_path: Path) -> None:
    async with listening(PlayingPeer(answer_with(thinker(False), talker("你好", 2)))) as wire:
        variables = {"OMNISTAGE_STATE": str(tmp_path), "OMNISTAGE_PLAYER": "none"}
        chat = partial(omnistage, "chat", "--address", wire.address, text="Hi\n", variables=variables)
        done = await asyncio.to_thread(chat)
    assert done.returncode == 0, done.stderr
    assert "not spoken: 你好 (2 characters)" in done.stderr.splitlines() and "seed" not in done.stderr


# The picture of its times, and captions


def report(stage: str, port: str, first_output_s: float, total_s: float) -> StageReport:
    return StageReport(stage, "127.0.0.1:1", 0.0, first_output_s, total_s, {}, {port: 10}, 0, 0)


def done(stages: tuple[StageReport, ...], timing: Timing, queued_s: float = 0.0, failovers: tuple[Failover, ...] = ()) -> Done:
    return Done("s", "toy", 1, "stop", Usage(stages, queued_s, 0.0, 0.0, 0.0), timing, failovers)


def lost(stage: str, at_s: float, pause_s: float, replica: str = "127.0.0.1:2") -> Failover:
    return Failover(stage, "127.0.0.1:1", replica, "killed", pause_s, at_s + pause_s)


STAGES = (report("thinker", "text", 0.10, 0.50), report("talker", "codes", 0.15, 0.60), report("code2wav", "audio", 0.20, 0.80))
TEXT = (TextArrival(0.0, 0), TextArrival(0.13, 5), TextArrival(0.54, 5))
AUDIO = (AudioArrival(0.24, 0, 24000, 24000, True), AudioArrival(1.9, 24000, 24000, 24000, True))


ANSWERED = Timing(TEXT, AUDIO, 1.95)
LATER = (STAGES[0], report("talker", "codes", 0.01, 0.60), report("code2wav", "audio", 0.23, 0.80))
DRAWING = report("diffusion", "image", 0.1, 0.2)


@pytest.mark.parametrize(
    ("answer", "expected_s"),
    [
        pytest.param(done(STAGES, ANSWERED), pytest.approx(0.03), id="as late as no arrival forbids"),
        pytest.param(done(STAGES, ANSWERED, queued_s=0.05), 0.05, id="not before admission"),
        pytest.param(done(LATER, ANSWERED), pytest.approx(0.01), id="as early as a stage worked"),
        pytest.param(done(LATER, ANSWERED, 0.0, (lost("talker", 1.2, 0.1),)), pytest.approx(0.03), id="but not one that was opened again"),
        pytest.param(done(LATER, ANSWERED, 0.02, (lost("router", 1.2, 0.1),)), 0.02, id="nor any behind a router that was lost"),
        pytest.param(done((DRAWING,), Timing((), (), 0.3)), pytest.approx(0.1), id="before its stages worked, where nothing arrived"),
    ],
)
def test_when_the_chain_was_opened(answer: Done, expected_s: object) -> None:
    assert opened_at(answer) == expected_s


SOUND = tuple(AudioArrival(at_s, i * 24000, 24000, 24000, True) for i, at_s in enumerate((1.0, 1.1, 4.0)))
"""Played from 1.0 to 3.0 and from 4.0 to 5.0."""


@pytest.mark.parametrize(
    ("failover", "sound", "words"),
    [
        (lost("talker", 3.2, 0.035), SOUND, "talker lost at 3.20 s, another went on after 35 ms; the listener waited 1.00 s for sound"),
        (lost("router", 4.1, 1.24, "127.0.0.1:1"), SOUND, "router lost at 4.10 s, it was back after 1.24 s; the listener noticed nothing"),
        (lost("thinker", 0.1, 0.02), (), "thinker lost at 0.10 s, another went on after 20 ms; nothing is missing"),
    ],
)
def test_a_loss_in_words(failover: Failover, sound: tuple[AudioArrival, ...], words: str) -> None:
    assert sentence(failover, Timing(TEXT, sound, 4.2)).removesuffix(" after it") == words


def test_a_listener_with_a_buffer_does_not_hear_what_it_covers() -> None:
    """0.6 s of sound, then 0.2 s that come 0.1 s too late for a player that began with the first."""
    arrivals = tuple(AudioArrival(at_s, i * 4800, 4800, 24000, True) for i, at_s in enumerate((1.0, 1.1, 1.3, 1.7)))
    timing = Timing((), arrivals, 1.8)
    assert timing.underrun_s == pytest.approx(0.1) and waited_s(lost("talker", 1.35, 0.1), timing) == 0.0
    assert waited_s(lost("talker", 1.05, 0.1), Timing((), (arrivals[0], arrivals[3]), 1.8)) == 0.0  # it had not begun


RESCUED = Timing(TEXT, (AUDIO[0], AudioArrival(1.1, 24000, 24000, 24000, True), AudioArrival(1.15, 48000, 24000, 24000, True)), 1.2)
LONG = Timing(TEXT, (AudioArrival(0.24, 0, 240000, 24000, True),), 0.6)
EVERY_STAGE = tuple(lost(stage, 0.3, 0.9) for stage in ("thinker", "talker", "code2wav", "router", "singer"))


@lengths.drawn_cells(
    4,
    ("stages", "timing", "failovers", "text"),
    [
        (STAGES, ANSWERED, (), "It costs $5 or $6."),
        (STAGES, LONG, (), "Longer to hear than to make."),
        (STAGES[:1], Timing(TEXT, (), 0.55), (), "word " * 200),
        (STAGES, Timing((), (), 0.1), (), ""),
        ((DRAWING,), Timing((), (), 0.3), (), "x" * 400),
        (STAGES, RESCUED, (lost("talker", 0.5, 0.04),), "Saved."),
        (STAGES, RESCUED, (lost("router", 0.01, 0.04),), "Saved."),
        (STAGES, RESCUED, (lost("code2wav", 1.18, 0.01), lost("talker", 0.2, 0.8)), "Saved."),
        (STAGES, ANSWERED, EVERY_STAGE, "Saved."),
        (STAGES, Timing(TEXT, (), 0.6), (lost("thinker", 0.3, 0.1),), "Saved."),
        (STAGES, Timing((), (), 0.6), (lost("thinker", 0.3, 0.1),), "Saved."),
    ],
)
def test_every_kind_of_answer_can_be_drawn(
    tmp_path: Path, stages: tuple[StageReport, ...], timing: Timing, failovers: tuple[Failover, ...], text: str
) -> None:
    heights = []
    for losses in (failovers, ()):
        draw(tmp_path / "picture.png", done(stages, timing, failovers=losses), text)
        data = (tmp_path / "picture.png").read_bytes()
        assert data.startswith(b"\x89PNG\r\n\x1a\n") and len(data) > 10_000
        assert int.from_bytes(data[16:20], "big") == 1800
        heights.append(int.from_bytes(data[20:24], "big"))
    assert not failovers or heights[0] > heights[1], "the buffer, and a line for each loss"


# Captions


def spoken(*words: str, begin_s: float = 0.0) -> list[SpokenWord]:
    """Words of 0.3 s, 0.1 s apart."""
    return [SpokenWord(word, 0, begin_s + 0.4 * number, begin_s + 0.4 * number + 0.3) for number, word in enumerate(words)]


def texts(words: list[SpokenWord]) -> list[str]:
    return [" ".join(word.text for word in caption) for caption in captions(words)]


def test_a_caption_ends_with_a_sentence_before_a_pause_and_before_it_is_too_long() -> None:
    assert texts(spoken("Yes.", "“Well,”", "no!”", "And", "so")) == ["Yes.", "“Well,” no!”", "And so"]
    assert texts([*spoken("one", "two"), *spoken("three", begin_s=1.4)]) == ["one two", "three"]
    assert texts(spoken(*["seven77"] * 7)) == [" ".join(["seven77"] * 5), "seven77 seven77"]


@given(st.lists(st.text(alphabet="ab.,! ", min_size=1, max_size=50).filter(str.strip), max_size=40))
def test_every_word_is_in_one_caption(given_words: list[str]) -> None:
    words = spoken(*given_words)
    told = list(captions(words))
    assert [word for caption in told for word in caption] == words
    for caption in told:
        assert len(caption) == 1 or len(" ".join(" ".join(word.text.split()) for word in caption)) <= MAX_CHARACTERS


def test_both_formats(tmp_path: Path) -> None:
    words = [*spoken("Dr.\nLee", "<b>&", "went."), *spoken("Late.", begin_s=3725.05)]
    srt = "1\n00:00:00,000 --> 00:00:01,100\nDr. Lee <b>& went.\n\n2\n01:02:05,050 --> 01:02:05,350\nLate.\n"
    vtt = "WEBVTT\n\n1\n00:00:00.000 --> 00:00:01.100\nDr. Lee &lt;b&gt;&amp; went.\n\n2\n01:02:05.050 --> 01:02:05.350\nLate.\n"
    for form, text in ((".srt", srt), (".vtt", vtt)):
        write_captions(words, tmp_path / "draft", form)
        assert (tmp_path / "draft").read_text() == text


@lengths.long_form(
    "cli/test_thoughts.py::test_both_formats",
    "cli/test_thoughts.py::test_a_caption_ends_with_a_sentence_before_a_pause_and_before_it_is_too_long",
    "models/test_alignment.py::test_every_spoken_word_is_told_with_its_place_in_the_markdown",
    unkept="the command writes captions beside the sound, and hands on that a text is Markdown",
)
def test_what_is_said_with_the_default_voice_has_its_captions(tmp_path: Path) -> None:
    srt, wav = tmp_path / "x.srt", tmp_path / "x.wav"
    done = omnistage("say", "*Good* morning to all of you. It _is_ late.", "--markdown", "--captions", srt, "--out", wav)
    assert done.returncode == 0, done.stderr
    assert f"wrote {wav}, {srt}" in done.stderr
    assert re.sub(r"\d\d:\d\d:\d\d,\d\d\d", "T", srt.read_text()) == (
        "1\nT --> T\nGood morning to all of you.\n\n2\nT --> T\nIt is late.\n"
    )


def test_a_pipeline_that_tells_no_words_is_told_by_the_name_of_the_option(toy_address: str, tmp_path: Path) -> None:
    for command in ("say", "ask"):
        error, hint = refusal(command, "Hi", "--captions", tmp_path / "x.vtt", "--address", toy_address)
        assert error == "error: --captions: toy gives text, audio, not 'alignment'"
        assert hint.startswith("hint: Leave --captions out")
    assert list(tmp_path.iterdir()) == []
