"""Text to phrases: cuts that do not depend on how the text arrives, and no cut where a reader would not pause. Phrases to phonemes:
numbers are spoken, what cannot be spoken is skipped, and nothing crashes."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from omnistage.models.smol.phrase import MAX_CHARACTERS, MAX_PHONEMES, PAD, Pause, Phonemizer, Phrase, PhraseCutter
from omnistage.models.smol.plain_text import PlainText
from omnistage.models.smol.spoken.characters import MARKS
from omnistage.models.smol.spoken.reader import read_aloud

MARKDOWN = "ab A1.!?;:,' \n\n#*_-`~[]()<>|\\/=+\"é😀漢"


def phrases(*pieces: str, plain: bool = False) -> list[Phrase]:
    """The phrases of a text of Markdown, or of one that is plain."""
    cutter = PhraseCutter(plain=plain)
    return [phrase for piece in pieces for phrase in cutter.feed(piece)] + list(cutter.flush())


def texts(text: str) -> list[str]:
    return [phrase.text for phrase in phrases(text)]


def without_markdown(text: str) -> str:
    converter = PlainText()
    return "".join(character for character, _ in converter.feed(text) + converter.flush())


def cut_at_random(text: str, draw: random.Random) -> list[str]:
    places = sorted(draw.randrange(len(text) + 1) for _ in range(draw.randrange(12)))
    return [text[a:b] for a, b in pairwise([0, *places, len(text)])]


@given(st.text(alphabet=MARKDOWN, max_size=120), st.randoms(use_true_random=False))
def test_phrases_do_not_depend_on_the_pieces(text: str, draw: random.Random) -> None:
    whole = phrases(text)
    assert phrases(*cut_at_random(text, draw)) == whole
    assert phrases(*text) == whole


@given(st.text(alphabet=MARKDOWN, max_size=120), st.randoms(use_true_random=False))
def test_given_text_keeps_every_character_and_its_place(text: str, draw: random.Random) -> None:
    whole = phrases(text, plain=True)
    assert phrases(*cut_at_random(text, draw), plain=True) == whole
    for phrase in whole:
        for character, place in zip(phrase.text, phrase.places, strict=True):
            assert character.isspace() or text[place] == character or text[place] in MARKS
    places = [place for phrase in whole for character, place in zip(phrase.text, phrase.places, strict=True) if not character.isspace()]
    assert "".join(text[place] for place in places) == "".join(text.split())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("wrapped\nhere", [("wrapped here", Pause.SENTENCE)]),
        ("Title\nNext", [("Title", Pause.PARAGRAPH), ("Next", Pause.SENTENCE)]),
        ("one\n\ntwo", [("one", Pause.PARAGRAPH), ("two", Pause.SENTENCE)]),
        ("one\r\n  \r\n  two\n", [("one", Pause.PARAGRAPH), ("two", Pause.SENTENCE)]),
        ("- *a*\n- [b](c)", [("- *a*", Pause.PARAGRAPH), ("- [b](c)", Pause.SENTENCE)]),
    ],
)
def test_lines_of_given_text_are_those_of_markdown(text: str, expected: list[tuple[str, Pause]]) -> None:
    assert [(phrase.text, phrase.pause) for phrase in phrases(text, plain=True)] == expected


@example("[~[1")
@example("1[!]")
@given(st.text(alphabet=MARKDOWN, max_size=200))
def test_every_character_knows_where_it_stands_in_the_markdown(text: str) -> None:
    """Words for signs ("times") and commas between cells stand nowhere."""
    reached = -1
    for phrase in phrases(text):
        assert len(phrase.places) == len(phrase.text)
        assert list(phrase.places) == sorted(phrase.places) and phrase.places[0] >= reached
        reached = phrase.places[-1]
        for character, place in zip(phrase.text, phrase.places, strict=True):
            assert character == text[place] or character in "times ," or text[place] in MARKS
    assert [phrase.places for phrase in phrases(*text)] == [phrase.places for phrase in phrases(text)]


@pytest.mark.parametrize("text", ["| a | b |", "|a| b  |c |", "| a |  | b |", "| **a** |[b](c)|"])
def test_the_cells_of_a_row_do_not_depend_on_the_pieces(text: str) -> None:
    one, other = PlainText(), PlainText()
    assert [placed for character in text for placed in one.feed(character)] + one.flush() == other.feed(text) + other.flush()


@given(st.text(alphabet="ab A1.!?;:,' ", max_size=600))
def test_no_character_is_lost_or_said_twice(text: str) -> None:
    spoken = "".join("".join(texts(text)).split())
    letters = [character for character in text if character.isalnum()]
    assert [character for character in spoken if character.isalnum()] == letters


@given(st.text(max_size=1000))
def test_a_phrase_is_bounded(text: str) -> None:
    for phrase in phrases(text):
        assert 0 < len(phrase.text) <= MAX_CHARACTERS
        assert "\n" not in phrase.text


def test_first_phrase_is_cut_after_four_words() -> None:
    cutter = PhraseCutter()
    assert list(cutter.feed("Paris has many museums")) == []
    assert list(cutter.feed(" ")) == [Phrase("Paris has many museums", Pause.NONE)]
    assert list(cutter.feed("and cafes that are open late at night ")) == []


@pytest.mark.parametrize(
    "form",
    [
        *("Louis XIV", "Bowl LVIII", "Section III", "Queen Elizabeth II", "War II", "5 million dollars", "3 pm", "May 3"),
        *("zip 02134", "PIN is 4521", "Room 204", "8 - 3 = 5", "x - 3", "10 km/h", "$20 - $30", "version 2.0", "1 1/2 cups", "USD 500"),
    ],
)
def test_a_written_form_is_never_cut_for_want_of_time(form: str) -> None:
    """Behind any number of words: some of them end the first phrase just inside it."""
    for number in range(6):
        text = "so we do see it " * 2
        found = texts(f"{' '.join(text.split()[:number])} {form} then and there and so on".strip())
        assert any(form in phrase for phrase in found), found


def test_a_text_that_is_too_long_is_cut_outside_of_forms() -> None:
    for number in range(12):
        found = texts("Some words, then " + "x" * number + " we have 10 km and 5 kg and " * 12)
        assert all(re.search(r"\d+$", phrase) is None for phrase in found), found


@pytest.mark.parametrize(
    "text",
    [
        *("Yes, 3.14 and", "It has 1,000 pages", "Now Dr. Smith came", "Say e.g. this", "At 10:30 a.m. sharp", "Ask J. K. Rowling"),
        *("See https://a.b/c,d;e.f?g=1 now", "Version 2.0.1 is out", "It costs $5.50 now", "1. Wash it"),
        *("The pp. 12-15", "The ch. 2", "See Sec. 4", "See para. 5", "See Art. 5", "Take ver. 2", "Op. 27 No. 2", "Ask Msgr. Brown"),
        *("See Fig. IV now", "See vol. II now", "Dial Ext. 345", "He took 5 lbs. 3 oz.", "He said no. 3 of us left"),
        *("Open 9 AM – 5 PM", "It is June 28 – July 3", "Open Monday – Friday, 9 – 5", "We are open noon – 3 PM", "Chapters I, II and III"),
    ],
)
def test_numbers_abbreviations_and_addresses_stay_whole(text: str) -> None:
    found = texts("One two three four! " + text)
    assert found[1:] == [text]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Great Wall of China is long", ["The Great Wall of China", "is long"]),
        ("We met on March 3 in the morning.", ["We met on March 3 in", "the morning."]),
        ("This thing is at 10 km from here.", ["This thing is at 10 km", "from here."]),
        ("Yes, well, it is.", ["Yes, well,", "it is."]),
        ("She said no. I said yes.", ["She said no.", "I said yes."]),
        ("He ate a fig. I ate two.", ["He ate a fig.", "I ate two."]),
        ("He took 5 lbs. Then he left.", ["He took 5 lbs.", "Then he left."]),
        ("It sat in the sun. She left.", ["It sat in the sun.", "She left."]),
        ("We met on Monday – it was good.", ["We met on Monday –", "it was good."]),
    ],
)
def test_a_text_is_cut_where_a_reader_would_pause(text: str, expected: list[str]) -> None:
    """The first phrase waits for a word that belongs to it; and a word that may be an abbreviation ends a sentence."""
    assert texts(text) == expected


@pytest.mark.parametrize(
    ("text", "pauses"),
    [
        ("One two three. Four five, six seven; eight nine", ["sentence", "clause", "clause", "sentence"]),
        ("# Title\n\nFirst line\n- item", ["paragraph", "paragraph", "sentence"]),
        ('He said "No way!" She left.', ["sentence", "sentence"]),
        ('He said "No way!" and left.', ["sentence"]),
    ],
)
def test_pauses(text: str, pauses: list[str]) -> None:
    assert [phrase.pause.value for phrase in phrases(text)] == pauses


@pytest.mark.parametrize(
    ("markdown", "expected"),
    [
        ("## Title\ntext", "Title\ntext"),
        ("- one\n* two\n+ three", "one\ntwo\nthree"),
        ("1. one\n2. two", "1. one\n2. two"),
        ("**bold** and *italic* and __both__ and ~~gone~~", "bold and italic and both and gone"),
        ("call `f(x)` now", "call f(x) now"),
        ("[text](http://x.y/z_1) here", "text here"),
        ("![a cat](cat.png)", "a cat"),
        ("[![badge](b.png)](http://x)", "badge"),
        ("<https://x.y> or <b>this</b>", "https://x.y or  this "),
        ("> quoted\n> again", "quoted again"),
        ("before\n```python\nprint(1)\n```\nafter", "before\nafter"),
        ("before\n~~~~\n```\n~~~~\nAfter", "before\nAfter"),
        ("| a | b |\n|---|:-:|\n| 1 | 2 |", "a, b, \n\n1, 2, "),
        ("one\n\n---\n\ntwo", "one\ntwo"),
        ("a wrapped\nline", "a wrapped line"),
        ("2 * 3 and 2*3", "2 times 3 and 2 times 3"),
        ("\\*not\\* bold", "*not* bold"),
        ("snake_case stays", "snake_case stays"),
        ("wow! yes!", "wow! yes!"),
        ("a < b > c", "a < b > c"),
        ("claim[1] and[^2]", "claim and"),
        ("- [ ] buy milk", " buy milk"),
        ("Hello **world", "Hello world"),
        ("open [link", "open link"),
        ("```\nnever closed", ""),
        ("-5 degrees", "-5 degrees"),
    ],
)
def test_markdown_is_not_read_aloud(markdown: str, expected: str) -> None:
    assert without_markdown(markdown) == expected


@pytest.mark.parametrize("text", ["", " ", "\n\n", "***", "---", "...", "#", "| | |", "```"])
def test_nothing_to_say_gives_no_phrase(text: str) -> None:
    assert phrases(text) == []


def test_signs_alone_are_a_phrase_unless_they_may_be_left_of_marks() -> None:
    """A reading says what of them is spoken."""
    assert texts("😀🎉") == ["😀🎉"]
    assert [phrase.text for phrase in phrases("+\n\n#", plain=True)] == ["+", "#"]


@pytest.mark.parametrize("unit", ["[", "<a", "*", "`", "word ", "x", "1 ", "a. ", "|", "\\", "![", "- ", "#", "\n"])
def test_long_text_of_one_kind_is_cut_or_skipped(unit: str) -> None:
    text = unit * (20_000 // len(unit))
    found = phrases(text)
    assert all(len(phrase.text) <= MAX_CHARACTERS for phrase in found)
    if unit in ("word ", "x"):
        assert len(found) >= 20_000 // MAX_CHARACTERS


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('He told us "the whole thing began back in 1999" and left.', "back in nineteen ninety nine and left."),
        ('He said, "I was born in London, in 1985", and left.', "in nineteen eighty five, and left."),
        ("He said, 'We like London, and the spirit of the year 76' and left.", "year seventy six and left."),
        ('He said, "We all went there, and bought a 55" screen" and left.', "bought a fifty five inch screen and left."),
        ('He said, "We all went there, and put a 6\' ladder up" and left.', "put a six foot ladder up and left."),
        ('He said, "We went." We all bought the one that is 55" and left.', "one that is fifty five inches and left."),
    ],
)
def test_a_number_may_end_a_quotation_that_began_in_an_earlier_phrase(text: str, words: str) -> None:
    found = phrases(text, plain=True)
    assert len(found) > 1
    assert " ".join(read_aloud(phrase.text).text for phrase in found).endswith(words)


# Phonemes -------------------------------------------------------------------------------------------------------------------------------


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
