"""A written form reads the same wherever it stands: in quotes and brackets, before marks, beside others. No mark joins two numbers."""

from __future__ import annotations

import random
import re
import unicodedata
from functools import cache

import pytest
from hibari.g2p import G2P
from models.test_spoken import FORMS, words_of

from helpers import lengths
from omnistage.models.smol.spoken.reader import read_aloud

QUOTES = [(pair[0], pair[1]) for pair in ("''", '""', "‘’", "“”", "«»", "„“", "‹›", "「」", "()", "[]", "{}")]
PLACES = (
    *(("", mark) for mark in (",", ";", ":", ".", "!", "?", "…", "?!", ")", "]", " –", " — so", ", and so on")),
    *(("Well, ", ", he said."), ("It says: ", "; and more."), ("Then — ", " — again."), ("I know ", ""), ("> ", ""), ("* ", "")),
)
OWN_PLACE = frozenset(("(only 5!)",))
"""Forms that another exclamation mark makes a formula of."""
LISTED = frozenset(("Part I", "James I and Charles I", "Book I liked"))
"""Forms of which "and" makes a list."""


@cache
def lexicon() -> G2P:
    return G2P()


def sounds_of(text: str) -> list[tuple[str, str]]:
    """Each token of the words with its phonemes."""
    g2p = lexicon()
    return [(token.text, token.phonemes or "") for token in g2p.phonemize_tokens(g2p.tokenize(read_aloud(text).text))]


def silent(sounds: list[tuple[str, str]]) -> list[str]:
    """Words without a sound."""
    return [token for token, phonemes in sounds if any(map(str.isalnum, token)) and not any(map(str.isalpha, phonemes))]


@lengths.rounds(300, len(FORMS))
def test_a_form_reads_the_same_in_quotes_and_brackets(seed: int, rounds: int) -> None:
    """By its words and by its phonemes, and no word is without a sound."""
    for written, words in random.Random(seed).sample(FORMS, rounds):
        plain = [phonemes for _, phonemes in sounds_of(written)]
        for opening, closing in QUOTES:
            quoted = f"{opening}{written}{closing}"
            sounds = sounds_of(quoted)
            assert words_of(quoted) == words, quoted
            assert read_aloud(quoted).unspoken == read_aloud(written).unspoken, quoted
            assert silent(sounds) == [], quoted
            if opening not in "([{":
                assert [phonemes for _, phonemes in sounds] == plain, quoted


@lengths.rounds(300, len(FORMS))
def test_a_form_reads_the_same_before_marks_and_within_sentences(seed: int, rounds: int) -> None:
    for written, words in random.Random(seed).sample(FORMS, rounds):
        for before, behind in PLACES:
            is_cut = bool(behind) and written.endswith((".", "!", "…", "?"))
            if not (is_cut or (behind.startswith("!") and written in OWN_PLACE) or ("and so" in behind and written in LISTED)):
                whole = " ".join(f"{words_of(before)} {words} {words_of(behind)}".split())
                assert words_of(f"{before}{written}{behind}") == whole, (before, written, behind)


@lengths.rounds(500, 5000)
def test_forms_drawn_in_quotes_beside_others(seed: int, rounds: int) -> None:
    """Two forms in one sentence, each in marks of its own: each keeps its words, and each word has a sound."""
    draw = random.Random(seed)
    for _ in range(rounds):
        (one, its_words), (other, other_words) = draw.sample([form for form in FORMS if not re.search(r"[\"'‘’“”′″.!?]", form[0])], 2)
        (first, last), (third, fourth) = draw.choice(QUOTES[2:]), draw.choice(QUOTES[2:])
        begin, end = draw.choice(("", "Here is ", "We read: ")), draw.choice((".", "?", " too."))
        between = draw.choice((" is beside ", ", then ", "; but "))
        text = f"{begin}{first}{one}{last}{between}{third}{other}{fourth}{end}"
        whole = f"{words_of(begin)} {its_words} {words_of(between)} {other_words} {words_of(end)}"
        assert words_of(text) == " ".join(whole.split()), text
        assert silent(sounds_of(text)) == [], text


CHARACTERS = map(chr, (*range(0x21, 0x3300), *range(0xFE00, 0x10000)))
MARKS = [mark for mark in CHARACTERS if (category := unicodedata.category(mark))[0] in "PSM" or category == "Cf"]
PAUSES = frozenset("!(),.:∶;?…|[]{}'\"")
"""Marks that are heard as a rest, or that are a part of a number or a time."""


@pytest.mark.parametrize(("first", "last"), [("5", "10"), ("1914", "1918"), ("3", "7")])
def test_no_mark_makes_one_number_of_two(first: str, last: str) -> None:
    """Each mark of Unicode between two numbers."""
    one = words_of(f"{first}{last}")
    assert len(MARKS) > 2000
    assert [mark for mark in MARKS if words_of(f"{first}{mark}{last}") == one] == []


def test_a_mark_between_two_numbers_is_said_told_or_a_rest() -> None:
    """Marks that are seen: not those of emoji, and none that only say how other characters join."""
    silent = []
    for mark in MARKS:
        reading = read_aloud(f"5{mark}10")
        is_plain = unicodedata.normalize("NFKC", mark) in PAUSES or unicodedata.category(mark) in ("Cf", "Ps", "Pe", "Pi", "Pf")
        rests = re.search(r"[,.;:!?…()—]", reading.text) is not None
        if words_of(f"5{mark}10") == "five ten" and not (reading.unspoken or rests or is_plain or mark in "\u20e3\ufe0e\ufe0f"):
            silent.append(mark)
    assert silent == []
