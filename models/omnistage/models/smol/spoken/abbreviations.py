"""Abbreviations, titles, and letters that are read one by one."""

from __future__ import annotations

import re

from omnistage.models.smol.spoken.form import COUNT_FOLLOWS, alternatives, before
from omnistage.models.smol.spoken.numbers import amount
from omnistage.models.smol.spoken.rules import Say
from omnistage.models.smol.spoken.tables import read_lists, read_short_forms

_FORMS = read_short_forms()
TITLES, DOTTED_TITLES = _FORMS["title"], _FORMS["dotted title"]
"""Titles before a name: with a full stop or without, and with one only."""
DOTTED, NUMBERED = _FORMS["dotted"], _FORMS["numbered"]
"""Abbreviations with a full stop: anywhere, and before a number only."""
WORDS_TOO = frozenset(read_lists()["may end a sentence"])
"""Abbreviations that may end a sentence, because they are words too."""
_LETTERED = frozenset(read_lists()["lettered"])
"""Abbreviations after which I may be a number, if a mark or the end follows it."""
SAYS = frozenset(read_lists()["saying"])
_ANSWERS = re.compile(
    rf"(?:, ?|\b(?:{alternatives(SAYS)}|told (?:him|her|them|us|me|you)|(?:answer|vote) (?:is|was)|[a-z]+ly|firm|clear|flat|big|oh) )$",
    re.IGNORECASE,
)
"""Words before the answer "no"."""
_ONE_BEFORE = re.compile(r"\b(?:an?|one|my|his|her|our|their|modern|fine|this|that|the) $", re.IGNORECASE)
"""Words before a fig or an app that is no abbreviation."""
_SENTENCE_BEFORE = re.compile(r"(?:^|[.!?…][\"'”’)]* )[\"'“‘(]*$")
_COUNT_ENDS = re.compile(r"#?\d[\w.,/–-]*(?<![.,])(?:$|[^\w\s]| (?:and|or|to|&) \d)")


def _numbered_abbreviation(match: re.Match[str]) -> str | None:
    """The word of an abbreviation before a number, "No. 3". None if a sentence ends there: "He said no. 3 of us left.", "No. I do not." """
    short, text = match["short"], match.string
    numeral = re.compile(r"[IVXivx]*\b").match(text, match.end())
    if numeral and numeral.group():
        if numeral.group() == "I":
            counts = short in _LETTERED and not re.compile(r" \w").match(text, numeral.end())
        else:
            begins = len(numeral.group()) == 1 or _SENTENCE_BEFORE.search(before(match, 4))
            counts = short not in ("No", "no") or "II" in numeral.group() or not begins
    elif short in WORDS_TOO and short.islower() and not _COUNT_ENDS.match(text, match.end()):
        number = re.compile(r"#?(?!1\b)\d[\w.,/–-]*").match(text, match.end())
        count_match = number is not None and COUNT_FOLLOWS.match(text, number.end())
        counts = not (count_match and not count_match.group().startswith(" of the")) and not (
            _ANSWERS if short == "no" else _ONE_BEFORE
        ).search(before(match, 16))
    else:
        counts = True
    return NUMBERED[short] if counts else None


def _function(match: re.Match[str]) -> str:
    """A function of variables: f(x) as "f of x", f'(x) as "f prime of x"."""
    primes = {"": "", "'": " prime", "''": " double prime"}[match["primes"]]
    return f"{match['name']}{primes} of {' and '.join(amount(one) if one.isdecimal() else one for one in re.split(', ?', match['of']))}"


FUNCTIONS: dict[str, Say] = {"numbered": _numbered_abbreviation, "function": _function}
SHORTS = frozenset((*TITLES, *DOTTED_TITLES, *DOTTED, *NUMBERED, *_FORMS["plain"], "WWI", "WWII", "WWIII", *_FORMS["function"]))
