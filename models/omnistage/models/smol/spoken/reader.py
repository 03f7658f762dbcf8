"""The reader of a text: tries the written forms in their order at each place, and puts their words together. `is_open` tells whether the
end of a text is read the same whatever follows, so that a voice may rest there."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from omnistage.models.smol.spoken import abbreviations, quantities, signs, times
from omnistage.models.smol.spoken.abbreviations import DOTTED_TITLES, SAYS, TITLES
from omnistage.models.smol.spoken.characters import BLANK, CURRENCY_SIGNS, GREEK, SIGN_WORDS, Quotation, clean
from omnistage.models.smol.spoken.notations import read_notations
from omnistage.models.smol.spoken.numbers import GROUP, amount, bare, cardinal, letters, table
from omnistage.models.smol.spoken.quantities import CURRENCIES
from omnistage.models.smol.spoken.rules import MAX_CONTEXT, Names, Rule, Spell, alternatives, read_lists, read_rules, read_short_forms
from omnistage.models.smol.spoken.signs import BOOKS, LABELS
from omnistage.models.smol.spoken.times import MONTHS, SHORT_DAYS, SHORT_MONTHS, WEEKDAYS, awaits_ratio


def _long_form(forms: Mapping[str, str], short_form: str) -> str:
    return forms.get(short_form, short_form)


_SPELLINGS: dict[str, Spell] = {
    **{kind: partial(_long_form, forms) for kind, forms in read_short_forms().items()},
    "written": str,
    "lower": str.lower,
    "cardinal": lambda text: cardinal(int(text)),
    "whole": lambda text: amount(text.lstrip("0") or "0"),
    "numeral": lambda text: cardinal(int(text) if text.isdecimal() else len(text)),
    "letters": letters,
    "bare": bare,
}
NAMES = Names(
    {name: alternatives(words) for name, words in (*read_lists().items(), *read_short_forms().items())}
    | quantities.PATTERNS
    | signs.PATTERNS
    | times.PATTERNS,
    _SPELLINGS | times.SPELLINGS | quantities.SPELLINGS | signs.SPELLINGS,
    dict(quantities.NOUNS),
    abbreviations.FUNCTIONS | times.FUNCTIONS | quantities.FUNCTIONS | signs.FUNCTIONS,
)
_WORDS = {**SIGN_WORDS, **GREEK, **{sign: CURRENCIES[sign][0] for sign in CURRENCY_SIGNS}, **abbreviations.ROMAN_SIGNS, BLANK: ""}
"""The words for signs that no rule reads."""


def _rules_by_start() -> tuple[dict[str, list[Rule]], dict[str, list[Rule]]]:
    """Two tables of rules. The key of the first is the sign with which a form begins, or _LETTER. The second has the forms that begin with
    digits: its key is the sign after the digits, _LETTER for a letter that no rule names, or "" for any other sign. A rule that does not
    say what follows its digits stands under every key."""
    rules, rules_of_digits = defaultdict[str, list[Rule]](list), defaultdict[str, list[Rule]](list)
    rows = list(read_rules("rules.tsv", NAMES))
    all_signs = {sign for begins, _ in rows for start in begins for sign in _following(start)} | {""}
    for begins, rule in rows:
        for start in begins:
            if start.startswith("digits"):
                start_signs = _following(start)
                for sign in all_signs:
                    if not start_signs or sign in start_signs or (sign.isalpha() and _LETTER in start_signs):
                        rules_of_digits[sign].append(rule)
            elif start == _LETTER:
                rules[_LETTER].append(rule)
            else:
                for sign in CURRENCY_SIGNS if start == "currency" else start:
                    rules[sign].append(rule)
    return dict(rules), dict(rules_of_digits)


def _following(start: str) -> Sequence[str]:
    """The signs of which one follows the digits: "digits+:" is a colon, "digits+_" a space, "digits+\\w" any letter. Empty for any sign."""
    signs = start.partition("+")[2]
    if signs == "currency":
        return f"{CURRENCY_SIGNS}¢"
    return [*signs.replace("\\w", "").replace("_", " "), *([_LETTER] if "\\w" in signs else [])]


_LETTER = "letters"
_RULES, _RULES_OF_DIGITS = _rules_by_start()
_SPECIAL = (
    abbreviations.SHORTS
    | frozenset(times.MONTHS)
    | frozenset(times.SHORT_MONTHS)
    | frozenset(times.SHORT_DAYS)
    | frozenset(sign for sign in CURRENCIES if sign.isalpha())
    | quantities.LONE_UNITS
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
        self._is_after_form = False  # Whether a form was read last, so that letters need a space before them.

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
        if character == "." and self._is_after_form and self._segment and self._segment[-1].endswith("."):
            return at + 1  # The stop of A.M. ends the sentence too.
        plain = _PLAIN.match(text, at)
        if plain and not (plain.group() in _SPECIAL or _ROMAN_LETTERS.issuperset(_ENDING.sub("", plain.group()))):
            return self._leave(plain)
        for rule in self._rules(at):
            match = rule.find(text, at)
            if match and match.end() > at:
                words = rule.words(match)
                if words is not None:
                    self._say(words)
                    self._passed += match.group().count(" ") + match.group().count(GROUP)
                    return match.end()
        if character in _WORDS:
            self._say(_WORDS[character])
            return at + 1
        return self._leave(_LETTERS.match(text, at) or _ANY.match(text, at))

    def _rules(self, at: int) -> Sequence[Rule]:
        """The rules whose forms may begin at a place."""
        character = self._text[at]
        if not character.isdecimal():
            return _RULES.get(character) or (_RULES[_LETTER] if character.isalpha() else ())
        end = _DIGITS.match(self._text, at).end()  # type: ignore[union-attr]
        following = self._text[end : end + 1].replace(GROUP, " ")
        rules = _RULES_OF_DIGITS.get(following)
        return rules if rules is not None else _RULES_OF_DIGITS[_LETTER if following.isalpha() else ""]

    def _say(self, words: str) -> None:
        """Add the words of a form, with a space between them and the letters before it."""
        if words and self._segment and self._segment[-1][-1:] not in _OPENERS:
            self._segment.append(" ")
        if words:
            self._segment.append(words)
        self._is_after_form = True

    def _leave(self, match: re.Match[str] | None) -> int:
        """Add a text as it is written; returns the place after it."""
        assert match is not None
        if self._is_after_form and (match.group()[0].isalnum() or match.group()[0] == "("):
            self._segment.append(" ")
        self._segment.append(match.group())
        self._is_after_form = False
        return match.end()

    def _end_segment(self) -> None:
        """End a segment at a space that no form spans, or at the end; punctuation alone joins the word before it."""
        words = "".join(self._segment).split()
        if self._words and words and _PUNCTUATION.fullmatch(words[0]):
            self._words[-1] += words.pop(0)
        self._words += words
        self._segment, self._is_after_form = [], False
        self._passed += 1
        self._borders.append((self._passed, len(self._words)))


_OPENERS = ("(", '"', "'", "“", "-", "–", "—")
_DIGITS = re.compile(r"\d+")
_ANY = re.compile(".", re.DOTALL)


def read_phrase(phrase: str) -> SpokenText:
    """Read a phrase aloud whose notations are replaced and whose quotes are told apart. Linear in its length."""
    cleaned = clean(phrase)
    return _Reading(cleaned.text).result(cleaned.unspoken)


def read_aloud(text: str) -> SpokenText:
    """Read any text aloud. Linear in its length."""
    return read_phrase(Quotation().read(read_notations(text)))


# Where a voice may rest --------------------------------------------------------------------------------------------------------------


_CLOSERS = "\"'”’)]}»(|"
_FORMS_GO_ON = frozenset(table("on by until since from before after due date dated a an one each every per sq cu fl ft st w"))
"""Words before a day or a price, or within a unit."""
_OPENING_NAMES = (
    frozenset((*MONTHS, *SHORT_MONTHS, *SHORT_DAYS, *TITLES, *DOTTED_TITLES))
    | abbreviations.LEADERS
    | abbreviations.SMALL_AFTER
    | BOOKS
    | frozenset(read_lists()["states"])
    | {"World", "Nº", "nº"}
    | SAYS
    | frozenset((*WEEKDAYS, *table("noon midnight Noon Midnight am pm AM PM")))
    | frozenset(sign for sign in CURRENCIES if sign.isalpha())
)
_KINDS_AFTER = frozenset(("a", "an", "one", "each", "every"))
"""A 5 km run: the unit is read as a kind of run."""
_AWAITING = (
    *(
        "lasting before",
        "long before",
        "stone before",
        "place before",
        "scored",
        "account",
        "secret before",
        "place name before",
        "versioned before",
    ),
    "emergency before",
)
"""Contexts that decide how a number after them is read."""
_AWAITED = re.compile(f"(?:{'|'.join(NAMES.patterns[name] for name in _AWAITING)}) ?$")
_SCALES = frozenset(NAMES.patterns["scale words"].split("|"))
_NUMERAL = re.compile(r"[IVXLCDM]{1,15}")
_HOUSE = re.compile(r"\d{3}[A-Z]?")
_ANY_LETTER = re.compile(r"[^\W\d_]")
_LONE_LETTERS = frozenset(("a", "A", "I"))


def _leads(words: list[str]) -> bool:
    return any((one.capitalize() if one.isupper() else one) in abbreviations.LEADERS for one in words)


def is_open(text: str) -> bool:
    """Whether the last word of a text may begin a written form that is not complete, or decides how the next word is read."""
    text = text[-80:].rstrip()
    words = text.split()[-3:]
    word = words[-1] if words else ""
    stem = word.strip(_CLOSERS)
    if not _ANY_LETTER.search(word) or any(map(str.isdigit, word)) or "\\" in word or word.endswith((".", "#", "/", "&")):
        return True
    if (
        stem.lower() in _FORMS_GO_ON | LABELS
        or stem in _OPENING_NAMES
        or stem.removesuffix("s") in abbreviations.PARTS | abbreviations.KINDS
        or stem.capitalize() in MONTHS
    ):
        return True
    if stem in ("and", "or") and _NUMERAL.fullmatch("".join(words[-2:-1]).rstrip(",")):
        return True
    if stem.isupper() and stem.capitalize() in _OPENING_NAMES:
        return True
    if stem == "the" and any(one in abbreviations.RULERS for one in words[-2:-1]):
        return True  # Elizabeth the II.
    if stem == "of" and len(words) == 3 and words[0].rstrip(".") in _OPENING_NAMES and words[1].isdecimal():
        return True
    if stem in _SCALES and any(any(map(str.isdecimal, one)) for one in words[:-1]):
        return True
    if stem in ("to", "of", "and", "or") and words[-2:-1] and re.fullmatch(r"\d+s", words[-2]):
        return True  # From 5s to 10s, 25s of audio.
    if len(words) == 3 and words[0].lower().lstrip(_CLOSERS + "“‘") in _KINDS_AFTER and any(map(str.isdecimal, words[1])):
        return True
    if len(stem.lstrip("-−")) == 1 and stem not in _LONE_LETTERS:
        return True
    if _NUMERAL.fullmatch(stem) and (len(stem) > 1 or _leads(words[:-1])):
        return True
    if stem[:1].isupper() and (_leads(words[:-1]) or any(_HOUSE.fullmatch(one) for one in words[:-1])):
        return True
    return awaits_ratio(f"{text} ") or _AWAITED.search(f"{text[-MAX_CONTEXT:]} ") is not None
