"""Phrases to phonemes: numbers are spoken, what cannot be spoken is skipped, and nothing crashes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnistage.models.smol.phrase import MAX_PHONEMES, PAD, Phonemizer

NASTY = "abcXYZ019.,'’-_/:$£€%&@#^~=<>()[]{}\"!?;+*°½²éßıſ—… 漢мع😀٣①"


@pytest.fixture(scope="module")
def phonemizer(default_model: Path) -> Phonemizer:
    return Phonemizer(json.loads((default_model / "talker" / "config.json").read_text())["symbols"])


def ids_of(phonemizer: Phonemizer, text: str) -> list[list[int]]:
    return [ids for ids, _ in phonemizer.ids(phonemizer.read(text).phonemes)]


@pytest.mark.parametrize(
    ("written", "spoken"),
    [
        ("I have 42 apples", "I have forty two apples"),
        ("It is 3.14", "It is three point one four"),
        ("1,200 people", "one thousand two hundred people"),
        ("the 21st day", "the twenty first day"),
        ("in 1984", "in nineteen eighty four"),
        ("$5.50", "five dollars and fifty cents"),
        ("50%", "fifty percent"),
        ("10:30 am", "ten thirty A.M."),
        ("5 km", "five kilometers"),
        ("visit https://www.example.com/a/b?c=1#d now", "visit example dot com slash a slash b now"),
        ("mail me@example.com", "mail me at example dot com"),
    ],
)
def test_numbers_and_addresses_are_spoken(phonemizer: Phonemizer, written: str, spoken: str) -> None:
    def sound(text: str) -> str:
        return "".join(letter for letter in phonemizer.read(text).phonemes if letter.isalpha() and letter not in "ˈˌ")

    assert sound(written) == sound(spoken)


@pytest.mark.parametrize("text", ["", "😀🎉", "你好，世界", "привет", "مرحبا", "...", "?!", "[]{}"])
def test_what_has_no_english_sound_gives_no_ids(phonemizer: Phonemizer, text: str) -> None:
    assert ids_of(phonemizer, text) == []


def test_emoji_and_other_scripts_are_left_out(phonemizer: Phonemizer) -> None:
    assert phonemizer.read("Hello 😀 there 世界.").phonemes == phonemizer.read("Hello there.").phonemes


@pytest.mark.parametrize(
    ("text", "unspoken"),
    [
        ("Hello there, “you” – all… café.", ()),
        ("The sign says 你好 to everyone, Привет.", ("你好", "Привет")),
        ("I ❤️ you 👩‍👩‍👧 all", ("❤️", "👩‍👩‍👧")),
        ("• one ■ two \u200b ｀", ("•", "■")),
    ],
)
def test_what_is_not_spoken_is_told(phonemizer: Phonemizer, text: str, unspoken: tuple[str, ...]) -> None:
    assert phonemizer.read(text).unspoken == unspoken


def test_phonemes_cannot_be_smuggled_in(phonemizer: Phonemizer) -> None:
    assert "ʒʒʒ" not in phonemizer.read("say [word](/ʒʒʒ/) now").phonemes


@pytest.mark.parametrize("digits", ["1" * 13, "9" * 200, ",".join(["999"] * 40), "1.2.3.4", "0." + "3" * 150])
def test_long_numbers_are_read_digit_by_digit(phonemizer: Phonemizer, digits: str) -> None:
    spelled = phonemizer.read(digits).normal.replace(",", "").split()
    assert set(spelled) <= {"one", "two", "three", "four", "nine", "hundred", "ninety", "zero", "point", "dot"}
    assert ids_of(phonemizer, digits)


def test_unknown_word_is_pronounced(phonemizer: Phonemizer) -> None:
    assert phonemizer.read("zorbling").phonemes


def test_parts_are_bounded(phonemizer: Phonemizer) -> None:
    parts = ids_of(phonemizer, "extraordinary " * 60)
    assert len(parts) > 1
    assert all(part[0] == part[-1] == PAD and len(part) <= MAX_PHONEMES + 2 for part in parts)


@given(st.one_of(st.text(alphabet=NASTY, max_size=60), st.text(max_size=60)))
def test_no_text_is_an_error(phonemizer: Phonemizer, text: str) -> None:
    for ids in ids_of(phonemizer, text):
        assert len(ids) > 2
        assert all(0 <= one < 178 for one in ids)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It’s “remarkable”, isn’t it?", ["It’s", "“remarkable”,", "isn’t", "it?"]),
        ("Dr. Lee paid $3.50 at 5:30 pm.", ["Dr.", "Lee", "paid", "$3.50", "at", "5:30 pm."]),
        ("walk 10 km - or 1/2 day - in 1999", ["walk", "10 km", "or", "1/2", "day", "in", "1999"]),
        ("on March 3, 2021 we met", ["on", "March 3,", "2021", "we", "met"]),
        ("see https://www.example.com/a?b=1 or 10-20 to 5-6", ["see", "https://www.example.com/a?b=1", "or", "10-20", "to", "5-6"]),
        ("Hello 😀 there 世界 .", ["Hello", "there"]),
        ("😀 ( yes )", ["yes"]),
        ("extraordinary " * 60, ["extraordinary"] * 60),
    ],
)
def test_words_are_told_apart_where_they_are_read_by_themselves(phonemizer: Phonemizer, text: str, expected: list[str]) -> None:
    reading, words = phonemizer.read(text), text.split()
    runs = list(phonemizer.runs(text, reading))
    assert [" ".join(words[run.begin : run.end]) for run in runs] == expected


CONNECTED = (
    *("the", "10", "km", "1/2", "March", "3,", "5:30", "pm", "Dr.", "Smith", "$5", "million", "No.", "-", "(", "yes,", "😀", "°C", "is."),
)


@given(st.lists(st.sampled_from(CONNECTED)))
def test_a_word_sounds_as_it_is_read_in_the_whole_and_no_sound_belongs_to_two(phonemizer: Phonemizer, words: list[str]) -> None:
    text = " ".join(words)
    reading = phonemizer.read(text)
    runs = list(phonemizer.runs(text, reading))
    heard = "".join(reading.phonemes[run.first : run.last] for run in runs)
    assert sounds(heard) == sounds(reading.phonemes)
    for before, after in pairwise(runs):
        assert before.end <= after.begin and before.last <= after.first


def sounds(phonemes: str) -> str:
    return "".join(letter for letter in phonemes if letter.isalpha())


def test_an_unknown_word_makes_no_library_write_down_or_tell_that_it_was_used(tmp_path: Path) -> None:
    """onnxruntime does both, unless it is told not to before its import."""
    program = "from omnistage.models.smol.phrase import Phonemizer; Phonemizer({}).read('zorbling'); import onnxruntime"
    unset = {name: value for name, value in os.environ.items() if name not in ("ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME")}
    subprocess.run([sys.executable, "-c", program], env={**unset, "HOME": str(tmp_path)}, check=True, timeout=60)
    assert list(tmp_path.iterdir()) == []
