"""What is written beside an answer: the picture of its times, where its numbers are made, and captions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import lengths
from helpers.command import omnistage
from helpers.output import refusal
from omnistage.cli.make.figures import sentence, waited_s
from omnistage.cli.make.speak import MAX_CHARACTERS, captions, write_captions
from omnistage.cli.timeline import draw, opened_at
from omnistage.client.events import AudioArrival, Done, Failover, SpokenWord, StageReport, TextArrival, Timing, Usage


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
    assert timing.underrun_s == pytest.approx(0.1)
    assert waited_s(lost("talker", 1.35, 0.1), timing) == 0.0
    assert waited_s(lost("talker", 1.05, 0.1), Timing((), (arrivals[0], arrivals[3]), 1.8)) == 0.0  # it had not begun


RESCUED = (AUDIO[0], AudioArrival(1.1, 24000, 24000, 24000, True), AudioArrival(1.15, 48000, 24000, 24000, True))


@lengths.drawn_cells(
    2,
    ("timing", "failovers"),
    [
        (Timing(TEXT, RESCUED, 1.2), (lost("talker", 0.5, 0.04),)),
        (Timing(TEXT, RESCUED, 1.2), (lost("router", 0.01, 0.04),)),
        (Timing(TEXT, RESCUED, 1.2), (lost("code2wav", 1.18, 0.01), lost("talker", 0.2, 0.8))),
        (Timing(TEXT, AUDIO, 1.95), tuple(lost(stage, 0.3, 0.9) for stage in ("thinker", "talker", "code2wav", "router", "singer"))),
        (Timing(TEXT, (), 0.6), (lost("thinker", 0.3, 0.1),)),
        (Timing((), (), 0.6), (lost("thinker", 0.3, 0.1),)),
    ],
)
def test_every_loss_can_be_drawn(tmp_path: Path, timing: Timing, failovers: tuple[Failover, ...]) -> None:
    path = tmp_path / "picture.png"
    draw(path, done(STAGES, timing, failovers=failovers), "Saved.")
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    draw(path, done(STAGES, timing), "Saved.")
    plain = path.read_bytes()
    width, height, plain_height = (int.from_bytes(picture[at : at + 4], "big") for picture, at in ((data, 16), (data, 20), (plain, 20)))
    assert width == 1800 and height > plain_height  # the buffer, and a line for each loss


@pytest.mark.parametrize(
    ("stages", "timing", "text"),
    [
        (STAGES, Timing(TEXT, AUDIO, 1.95), "It costs $5 or $6."),
        (STAGES, Timing(TEXT, (AudioArrival(0.24, 0, 240000, 24000, True),), 0.6), "Longer to hear than to make."),
        (STAGES[:1], Timing(TEXT, (), 0.55), "word " * 200),
        (STAGES, Timing((), (), 0.1), ""),
        ((DRAWING,), Timing((), (), 0.3), "x" * 400),
    ],
)
def test_every_kind_of_answer_can_be_drawn(tmp_path: Path, stages: tuple[StageReport, ...], timing: Timing, text: str) -> None:
    path = tmp_path / "picture.png"
    draw(path, done(stages, timing), text)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") and path.stat().st_size > 10_000


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
    "cli/test_timeline.py::test_both_formats",
    "cli/test_timeline.py::test_a_caption_ends_with_a_sentence_before_a_pause_and_before_it_is_too_long",
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
