"""Captions: every word once, in lines that can be read, with times as their formats have them."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from helpers import lengths
from helpers.command import omnistage
from helpers.output import refusal
from omnistage.cli.make.speak import MAX_CHARACTERS, captions, write_captions
from omnistage.client.events import SpokenWord


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
    "cli/test_captions.py::test_both_formats",
    "cli/test_captions.py::test_a_caption_ends_with_a_sentence_before_a_pause_and_before_it_is_too_long",
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
