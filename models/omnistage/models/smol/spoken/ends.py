"""The check whether the end of a text is read the same whatever follows, so that a voice may rest there."""

from __future__ import annotations

import re

from omnistage.models.smol.spoken import roman
from omnistage.models.smol.spoken.abbreviations import DOTTED_TITLES, SAYS, TITLES
from omnistage.models.smol.spoken.currencies import CURRENCIES
from omnistage.models.smol.spoken.form import table
from omnistage.models.smol.spoken.reader import NAMES
from omnistage.models.smol.spoken.rules import MAX_CONTEXT
from omnistage.models.smol.spoken.signs import BOOKS, LABELS
from omnistage.models.smol.spoken.tables import read_lists
from omnistage.models.smol.spoken.times import MONTHS, SHORT_DAYS, SHORT_MONTHS, WEEKDAYS, awaits_ratio

_CLOSERS = "\"'”’)]}»(|"
_FORMS_GO_ON = frozenset(table("on by until since from before after due date dated a an one each every per sq cu fl ft w"))
"""Words before a day or a price, or within a unit."""
_NAMES = (
    frozenset((*MONTHS, *SHORT_MONTHS, *SHORT_DAYS, *TITLES, *DOTTED_TITLES))
    | roman.LEADERS
    | roman.SMALL_AFTER
    | BOOKS
    | frozenset(read_lists()["states"])
    | {"World", "Nº"}
    | SAYS
    | frozenset((*WEEKDAYS, *table("noon midnight Noon Midnight am pm AM PM")))
    | frozenset(sign for sign in CURRENCIES if sign.isalpha())
)
_KINDS_AFTER = frozenset(("a", "an", "one", "each", "every"))
"""A 5 km run: the unit is read as a kind of run."""
_AWAITING = (
    "lasting before",
    "place before",
    "scored",
    "account",
    "secret before",
    "place name before",
    "versioned before",
    "emergency before",
)
"""Contexts that decide how a number after them is read."""
_AWAITED = re.compile(f"(?:{'|'.join(NAMES.patterns[name] for name in _AWAITING)}) ?$")
_SCALES = frozenset(NAMES.patterns["scale words"].split("|"))
_NUMERAL = re.compile(r"[IVXLCDM]{1,15}")
_HOUSE = re.compile(r"\d{3}[A-Z]?")
_LETTER = re.compile(r"[^\W\d_]")
_SAME = frozenset(("a", "A", "I"))


def _leads(words: list[str]) -> bool:
    return any((one.capitalize() if one.isupper() else one) in roman.LEADERS for one in words)


def is_open(text: str) -> bool:
    """Whether the last word of a text may begin a written form that is not complete, or decides how the next word is read."""
    text = text[-80:].rstrip()
    words = text.split()[-3:]
    word = words[-1] if words else ""
    stem = word.strip(_CLOSERS)
    if not _LETTER.search(word) or any(map(str.isdigit, word)) or "\\" in word or word.endswith((".", "#", "/", "&")):
        return True
    if (
        stem.lower() in _FORMS_GO_ON | LABELS
        or stem in _NAMES
        or stem.removesuffix("s") in roman.PARTS | roman.KINDS
        or stem.capitalize() in MONTHS
    ):
        return True
    if stem in ("and", "or") and _NUMERAL.fullmatch("".join(words[-2:-1]).rstrip(",")):
        return True
    if stem.isupper() and stem.capitalize() in _NAMES:
        return True
    if stem == "the" and any(one in roman.RULERS for one in words[-2:-1]):
        return True  # Elizabeth the II.
    if stem == "of" and len(words) == 3 and words[0].rstrip(".") in _NAMES and words[1].isdecimal():
        return True
    if stem in _SCALES and any(any(map(str.isdecimal, one)) for one in words[:-1]):
        return True
    if stem in ("to", "of", "and", "or") and words[-2:-1] and re.fullmatch(r"\d+s", words[-2]):
        return True  # From 5s to 10s, 25s of audio.
    if len(words) == 3 and words[0].lower().lstrip(_CLOSERS + "“‘") in _KINDS_AFTER and any(map(str.isdecimal, words[1])):
        return True
    if len(stem.lstrip("-−")) == 1 and stem not in _SAME:
        return True
    if _NUMERAL.fullmatch(stem) and (len(stem) > 1 or _leads(words[:-1])):
        return True
    if stem[:1].isupper() and (_leads(words[:-1]) or any(_HOUSE.fullmatch(one) for one in words[:-1])):
        return True
    return awaits_ratio(f"{text} ") or _AWAITED.search(f"{text[-MAX_CONTEXT:]} ") is not None
