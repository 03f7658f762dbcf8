"""The text around a written form, and what it says about the form."""

from __future__ import annotations

import re
from collections.abc import Iterable

from omnistage.models.smol.spoken.tables import read_lists


def before(match: re.Match[str], characters: int) -> str:
    """The text before a match, at most `characters` long."""
    return match.string[max(match.start() - characters, 0) : match.start()]


def after(match: re.Match[str], characters: int) -> str:
    """The text after a match, at most `characters` long."""
    return match.string[match.end() : match.end() + characters]


_CLAUSE = re.compile(r"[;!?]|[.,:] |[A-Za-z]{3,}")
_RELATION = re.compile(r"[=≠≤≥≈]")


def in_equation(match: re.Match[str]) -> bool:
    """Whether a relation sign (= ≠ ≤ ≥ ≈) stands near the match, with no word of three letters and no end of a clause between."""
    return bool(_RELATION.search(_CLAUSE.split(before(match, 60))[-1]) or _RELATION.search(_CLAUSE.split(after(match, 60))[0]))


def alternatives(words: Iterable[str]) -> str:
    """A pattern that matches any of these words, the longest that fits."""
    return "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))


def table(words: str) -> tuple[str, ...]:
    """The words of a line."""
    return tuple(words.split())


COUNT_FOLLOWS = re.compile(
    r" (?:of (?:us|them|you|these|those|the|my|our|his|her|their)\b(?! (?:same|following|next|previous) year)"
    r"|(?:people|(?:wo)?men|children|feet)\b"
    r"|(?!(?:was|is|has|as|this|his|its|us|does|across|unless|always|perhaps|sometimes|plus|minus|versus|yes|thus|besides|towards|afterwards"
    r"|regardless|less|marks|falls|begins|starts|ends|brings|comes|works|looks|remains|becomes|seems|means|sees|opens|closes|runs|goes|lies"
    r"|says|gives|takes|makes|shows|deals|lists|honors|celebrates|commemorates)\b)[a-z]{2,}(?<![su])s\b)"
)
"""Words after a number that counts things, as in "By May 20 people had come": plurals. Some words that end with s are verbs."""


_THING_BEFORE = re.compile(r"\b(?:an?|one|each|every) $", re.IGNORECASE)
_THING = re.compile(
    r"(?: |-)(?!(?:or|to|in|of|for|and|per|wide|tall|long|high|deep|thick|on|at|an?|is|was|are|were|from|with|by|the|that|which|as|if|each"
    r"|every|more|less)\b)[a-z]{2,}"
)
_KIND = re.compile(rf"[ -](?:{'|'.join(read_lists()['things'])})s?(?![\w'-])")
_MEASURE = re.compile(rf" (?:{'|'.join(read_lists()['sized things'])})s?\b")


def is_kind(match: re.Match[str]) -> bool:
    """Whether an amount says what kind of thing follows: a 5 km run, the 60 W bulb."""
    text, end = match.string, match.end()
    if _KIND.match(text, end) or _MEASURE.match(text, end):
        return True
    return bool(_THING_BEFORE.search(before(match, 8)) and _THING.match(text, end))
