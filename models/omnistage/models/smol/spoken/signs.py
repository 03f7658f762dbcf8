"""The words for signs that take more than a row: powers, sums, absolute values, ranges of numbers."""

from __future__ import annotations

import re

from omnistage.models.smol.spoken.characters import CURRENCY_SIGNS, GREEK, SUPERSCRIPTS
from omnistage.models.smol.spoken.form import after, before
from omnistage.models.smol.spoken.numbers import amount, cardinal, ordinal, parse_number
from omnistage.models.smol.spoken.rules import Say, Spell
from omnistage.models.smol.spoken.tables import read_lists, read_short_forms

BOOKS, SHORT_BOOKS = frozenset(read_lists()["books"]), read_short_forms()["book"]
LABELS = frozenset((*read_lists()["labels"], *read_lists()["labels of ranges"]))
"""Words that decide whether a hyphen after the next number is a rest, or "to"."""
_SUMS = {"Σ": "the sum", "∑": "the sum", "∏": "the product", "Π": "the product", "∫": "the integral"}
_BOUND_WORDS = {"=": "equals", "∞": "infinity", "-": "minus", "−": "minus", "+": "plus", "∈": "in"}
_ABSOLUTE = re.compile(r"\|(?! )(?![^|]{0,30}[A-Za-z]{2})[-−+*/^²³ ().\dA-Za-z]{1,30}(?<! )\|(?![\w|])")
_FIRST, _LAST = re.compile(r"\d[\d,.]*(?=[^\d]{0,6}$)"), re.compile(r"[^\d]{0,5}(\d[\d,.]*)")


def _ascending(match: re.Match[str]) -> str | None:
    """The word "to" for a dash between two numbers the second of which is greater. None for others."""
    first, last = _FIRST.search(before(match, 24)), _LAST.match(after(match, 24))
    if first is None or last is None:
        return None
    return "to" if _value(first.group()) < _value(last[1]) else None


def _value(number: str) -> float:
    integer, part, _ = parse_number(number.rstrip(".,"))
    return float(f"{integer or 0}.{part or 0}")


def _power(power: str) -> str:
    """A power in words: "2" as "squared", "-1" as "to the power of minus one", "2+" as the charge of an ion."""
    power = _plain(power)
    if power in ("2", "3"):
        return "squared" if power == "2" else "cubed"
    if power[-1] in "-+":  # The charge of an ion.
        return f"{amount(power[:-1]) if power[:-1].isdecimal() else ''} {'plus' if power[-1] == '+' else 'minus'}".strip()
    sign = "minus " if power[0] in "-−" else ""
    number = power.lstrip("-−+")
    return f"to the power of {sign}{amount(number) if number.isdecimal() else number}".rstrip()


def _plain(power: str) -> str:
    return "".join(SUPERSCRIPTS.get(one, one) for one in power)


def _stars(match: re.Match[str]) -> str:
    """★★★★☆ as "four out of five stars"."""
    stars, every = match.group().count("★"), len(match.group())
    return f"{cardinal(stars)} stars" if stars == every else f"{cardinal(stars)} out of {cardinal(every)} stars"


def _bind(text: str) -> str:
    pieces = re.findall(r"\d+|[A-Za-z]+|[=∞−+∈-]", text)
    return " ".join(amount(one) if one.isdecimal() else _BOUND_WORDS.get(one, one) for one in pieces)


def _sum(match: re.Match[str]) -> str:
    """A sum, product or integral with its bounds: Σ_{i=1}^{n} as "the sum from i equals one to n of"."""
    words = f"{_SUMS[match['sign']]} {'from' if match['last'] else 'over'} {_bind(match['first'])}"
    if match["last"]:
        words += f" to {_bind(match['last'])}"
    return words if re.match(r" of\b", after(match, 4)) else f"{words} of"


def _bar(match: re.Match[str]) -> str:
    """The words for |: the first of |x| opens an absolute value, the second is empty; elsewhere it separates cells, as a comma."""
    if before(match, 1) != "|" and not before(match, 1).isalpha() and _ABSOLUTE.match(match.string, match.start()):
        return "the absolute value of"
    opened = match.string.rfind("|", max(match.start() - 30, 0), match.start())
    absolute = _ABSOLUTE.match(match.string, opened) if opened >= 0 else None
    return "" if absolute and absolute.end() == match.end() else ","


PATTERNS = {
    "money sign": f"[{re.escape(CURRENCY_SIGNS)}]",
    "greek letter": f"[{''.join(GREEK)}]",
    "power sign": f"[{''.join(SUPERSCRIPTS)}]",
}
SPELLINGS: dict[str, Spell] = {
    "power": _power,
    "number of power": lambda text: amount(_plain(text)),
    "ordinal power": lambda text: ordinal(int(_plain(text))) if _plain(text).isdecimal() else _plain(text),
}
FUNCTIONS: dict[str, Say] = {"ascending": _ascending, "bar": _bar, "stars": _stars, "sum": _sum}
