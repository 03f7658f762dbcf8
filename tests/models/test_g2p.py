"""Phrases to phonemes: numbers are spoken, what cannot be spoken is skipped, and nothing crashes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnistage.models.smol.g2p import MAX_PHONEMES, PAD, Phonemizer, speakable

NASTY = "abcXYZ019.,'’-_/:$£€%&@#^~=<>()[]{}\"!?;+*°½²éßıſ—… 漢мع😀٣①"


@pytest.fixture(scope="module")
def phonemizer(default_model: Path) -> Phonemizer:
    return Phonemizer(json.loads((default_model / "talker" / "config.json").read_text())["symbols"])


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
        ("visit https://www.example.com/a/b?c=1#d now", "visit example dot com now"),
        ("mail me@example.com", "mail me at example dot com"),
    ],
)
def test_numbers_and_addresses_are_spoken(phonemizer: Phonemizer, written: str, spoken: str) -> None:
    def sound(text: str) -> str:
        return "".join(letter for letter in phonemizer.phonemes(text) if letter.isalpha() and letter not in "ˈˌ")

    assert sound(written) == sound(spoken)


@pytest.mark.parametrize("text", ["", "😀🎉", "你好，世界", "привет", "مرحبا", "...", "?!", "[]{}"])
def test_what_has_no_english_sound_gives_no_ids(phonemizer: Phonemizer, text: str) -> None:
    assert list(phonemizer.ids(text)) == []


def test_emoji_and_other_scripts_are_left_out(phonemizer: Phonemizer) -> None:
    assert phonemizer.phonemes("Hello 😀 there 世界.") == phonemizer.phonemes("Hello there.")


def test_phonemes_cannot_be_smuggled_in(phonemizer: Phonemizer) -> None:
    assert "ʒʒʒ" not in phonemizer.phonemes("say [word](/ʒʒʒ/) now")


@pytest.mark.parametrize("digits", ["1" * 13, "9" * 200, ",".join(["999"] * 40), "1.2.3.4", "0." + "3" * 150])
def test_long_numbers_are_read_digit_by_digit(phonemizer: Phonemizer, digits: str) -> None:
    spelled = speakable(digits).split()
    assert all(len(part) <= 4 for part in spelled)
    assert list(phonemizer.ids(digits))


def test_unknown_word_is_pronounced(phonemizer: Phonemizer) -> None:
    assert phonemizer.phonemes("zorbling")


def test_parts_are_bounded(phonemizer: Phonemizer) -> None:
    parts = list(phonemizer.ids("extraordinary " * 60))
    assert len(parts) > 1
    assert all(part[0] == part[-1] == PAD and len(part) <= MAX_PHONEMES + 2 for part in parts)


@given(st.one_of(st.text(alphabet=NASTY, max_size=60), st.text(max_size=60)))
def test_no_text_is_an_error(phonemizer: Phonemizer, text: str) -> None:
    for ids in phonemizer.ids(text):
        assert len(ids) > 2
        assert all(0 <= one < 178 for one in ids)


def test_an_unknown_word_makes_no_library_write_down_or_tell_that_it_was_used(tmp_path: Path) -> None:
    """onnxruntime does both, unless it is told not to before its import."""
    program = "from omnistage.models.smol.g2p import Phonemizer; Phonemizer({}).phonemes('zorbling'); import onnxruntime"
    unset = {name: value for name, value in os.environ.items() if name not in ("ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME")}
    subprocess.run([sys.executable, "-c", program], env={**unset, "HOME": str(tmp_path)}, check=True, timeout=60)
    assert list(tmp_path.iterdir()) == []
