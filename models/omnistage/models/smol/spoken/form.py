"""A written form: a pattern in a text, and the words that are spoken for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

Say = Callable[[re.Match[str]], str | None]


@dataclass(frozen=True, slots=True)
class Form:
    """A pattern and a function. say: returns the words for a match: "" for a mark without a sound, None if the match is something else
    after all. A pattern reads at most a fixed number of characters, so that reading takes linear time."""

    pattern: re.Pattern[str]
    say: Say


def form(pattern: str, say: Say | str) -> Form:
    """Make a form. say: a function as in Form, or the words themselves."""
    return Form(re.compile(pattern), (lambda match: say) if isinstance(say, str) else say)


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
