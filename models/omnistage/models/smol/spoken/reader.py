"""The reader of a text: tries the written forms in their order at each place, and puts their words together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from omnistage.models.smol.spoken import abbreviations, addresses, codes, quantities, roman, signs, times, units
from omnistage.models.smol.spoken.characters import CURRENCY_SIGNS, FRACTIONS, clean
from omnistage.models.smol.spoken.currencies import CURRENCIES
from omnistage.models.smol.spoken.form import Form, before, form
from omnistage.models.smol.spoken.numbers import GROUP


def _lone_unit(match: re.Match[str]) -> str | None:
    """A unit without a number: singular after "per" or "a", else plural. None for a mm that is no unit."""
    if match.group() == "mm" and not _MEASURED.search(before(match, 12)):
        return None  # Mm, mmm.
    single = re.search(r"\b(?:per|an?|each|every) $", before(match, 6))
    return units.unit_names(match.group())[0 if single else 1]


_MEASURED = re.compile(r"(?:\b(?:in|per|to|of|or|and|from|an?|the|each|every|into|as|by|are|is|units?:?)|[,(:/]) ?$")
_LONE_UNITS = (form(rf"(?<![\w/.])(?:{units.LONE_UNIT})(?![\w/²³^])", _lone_unit),)
_WORD_FORMS = (
    *addresses.ADDRESSES,
    *addresses.PATHS,
    *codes.HARDWARE,
    *codes.MACHINES,
    *addresses.SNAKES,
    *quantities.MONEY,
    *codes.V_VERSIONS,
    *codes.CHARACTER_CODES,
    *times.ZONES,
    *signs.BOOK_FORMS,
    *times.MONTH_DAYS,
    *roman.ROMAN,
    *abbreviations.ABBREVIATIONS,
    *quantities.SIZES,
    *_LONE_UNITS,
)
_DIGIT_FORMS = (
    *addresses.ADDRESSES,
    *codes.HARDWARE,
    *codes.MACHINES,
    *signs.BOOK_NUMBERS,
    *quantities.TENS_OF_SECONDS,
    *times.TIMES,
    *codes.NAMES,
    *quantities.QUANTITIES,
    *times.DAYS,
    *codes.PLAIN,
)
_SIGN_FORMS: dict[str, tuple[Form, ...]] = {
    **signs.SIGNS,
    **dict.fromkeys(FRACTIONS, quantities.QUANTITIES),
    **{sign: (*addresses.PATHS, *signs.SIGNS[sign]) for sign in "/~\\@#*"},
    **{sign: (*quantities.PRICES, *quantities.SIGNED_NEGATIVES, *quantities.MONEY, *signs.SIGNS[sign]) for sign in CURRENCY_SIGNS},
    "μ": (*_LONE_UNITS, *signs.SIGNS["μ"]),
    "'": times.APOSTROPHES,
    "+": (*codes.PHONES, *signs.SIGNS["+"]),
    "(": (*codes.PHONES, *codes.BRACKETED, *quantities.NEGATIVES),
    ":": (*codes.MACHINES, *signs.SIGNS[":"]),
    ".": (*addresses.PATHS, *signs.SIGNS["."], *quantities.QUANTITIES, *codes.PLAIN),
    "_": (*addresses.ADDRESSES, *addresses.SNAKES, *signs.SIGNS["_"]),
}
_SPECIAL = (
    abbreviations.SHORTS
    | frozenset(times.MONTHS)
    | frozenset(times.SHORT_MONTHS)
    | frozenset(times.SHORT_DAYS)
    | frozenset(sign for sign in CURRENCIES if sign.isalpha())
    | units.LONE
    | frozenset(signs.SHORT_BOOKS)
)
_PLAIN = re.compile(r"[A-Za-zÀ-ÖØ-öø-ÿ]{2,}(?:'[a-zA-Z]+)*(?=[ ,;!?)\"”]|$|\.(?: |$))|[A-Z]'(?:m|d|ll|ve|re|s)\b|[aAI](?= [a-z])")
_LETTERS = re.compile(r"[A-Za-zÀ-ÖØ-öø-ÿ]+(?:'[a-zA-Z]+)*")
_ROMAN_LETTERS = frozenset("IVXLCDMivx")
_ENDING = re.compile("(?:th|st|nd|rd|'.*)$")
_PUNCTUATION = re.compile(r"[,.;:!?]+")


@dataclass(frozen=True, slots=True)
class SpokenText:
    """A text as it is spoken. words: the spoken words, with their punctuation. borders: the gaps between words of the text that no written
    form spans, and the two ends: for each, how many words of the text and how many of `words` are before it. unspoken: as in Clean."""

    words: tuple[str, ...]
    borders: tuple[tuple[int, int], ...]
    unspoken: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join(self.words)


class _Reading:
    """Reads one text, form by form. A segment is the words between two spaces that no form spans."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._words: list[str] = []
        self._borders = [(0, 0)]
        self._passed = 0  # How many words of the text were read.
        self._segment: list[str] = []
        self._apart = False  # Whether a form was read last, so that letters need a space before them.

    def result(self, unspoken: tuple[str, ...]) -> SpokenText:
        """Read the whole text. unspoken: as in SpokenText."""
        at, text = 0, self._text
        while at < len(text):
            at = self._step(at)
        self._end_segment()
        return SpokenText(tuple(self._words), tuple(self._borders), unspoken)

    def _step(self, at: int) -> int:
        """Read the form or the word that begins at a place; returns the place after it."""
        text = self._text
        character = text[at]
        if character in (" ", GROUP):
            self._end_segment()
            return at + 1
        if character == "." and self._apart and self._segment and self._segment[-1].endswith("."):
            return at + 1  # The stop of A.M. ends the sentence too.
        plain = _PLAIN.match(text, at)
        if plain and not _may_begin_form(plain.group()):
            return self._leave(plain)
        for one in _forms(character):
            match = one.pattern.match(text, at)
            if match and match.end() > at:
                words = one.say(match)
                if words is not None:
                    self._say(words)
                    self._passed += match.group().count(" ") + match.group().count(GROUP)
                    return match.end()
        return self._leave(_LETTERS.match(text, at) or _ANY.match(text, at))

    def _say(self, words: str) -> None:
        """Add the words of a form, with a space between them and the letters before it."""
        if words and self._segment and self._segment[-1][-1:] not in _OPENERS:
            self._segment.append(" ")
        if words:
            self._segment.append(words)
        self._apart = True

    def _leave(self, match: re.Match[str] | None) -> int:
        """Add a text as it is written; returns the place after it."""
        assert match is not None
        if self._apart and (match.group()[0].isalnum() or match.group()[0] == "("):
            self._segment.append(" ")
        self._segment.append(match.group())
        self._apart = False
        return match.end()

    def _end_segment(self) -> None:
        """End a segment at a space that no form spans, or at the end; punctuation alone joins the word before it."""
        words = "".join(self._segment).split()
        if self._words and words and _PUNCTUATION.fullmatch(words[0]):
            self._words[-1] += words.pop(0)
        self._words += words
        self._segment, self._apart = [], False
        self._passed += 1
        self._borders.append((self._passed, len(self._words)))


_OPENERS = ("(", '"', "'", "“", "-", "–", "—")
_ANY = re.compile(".", re.DOTALL)


def _may_begin_form(word: str) -> bool:
    return word in _SPECIAL or _ROMAN_LETTERS.issuperset(_ENDING.sub("", word))


def _forms(character: str) -> Sequence[Form]:
    if character.isalpha() and character not in _SIGN_FORMS:
        return _WORD_FORMS
    return _DIGIT_FORMS if character.isdecimal() else _SIGN_FORMS.get(character, ())


def read_aloud(text: str) -> SpokenText:
    """Read a text aloud. Linear in its length."""
    cleaned = clean(text)
    return _Reading(cleaned.text).result(cleaned.unspoken)
