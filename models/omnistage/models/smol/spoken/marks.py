"""Marks of ions, of programs, of formulas and of the web: the letters around a mark decide its meaning."""

from __future__ import annotations

import re

from omnistage.models.smol.spoken.form import Form, after, before, form, table
from omnistage.models.smol.spoken.numbers import amount, cardinal
from omnistage.models.smol.spoken.units import unit_names

_ION = re.compile(
    r"(?<![\w'’-])(?:Cl|Br|OH|CN|SCN|HS|NO[23]|HCO3|HSO[34]|H2PO4|MnO4|ClO[34]?|AlO2|BF4|PF6|CH3COO|HCOO|O|AB|Rh|RhD|F(?= ?ion))$"
)
"""Letters before a sign of charge, and groups of blood."""
_FORMULA = re.compile(r"[A-Z][a-z]?\d{0,2}\)?\d{0,2}$")
_COMMANDS = "|".join(
    table("awk cat column cut egrep fold grep head jq less more nl pbcopy python python3 sed sh bash sort tail tee tr uniq wc xargs")
)
_SUMS = {"Σ": "the sum", "∑": "the sum", "∏": "the product", "Π": "the product", "∫": "the integral"}
_BOUND_WORDS = {"=": "equals", "∞": "infinity", "-": "minus", "−": "minus", "+": "plus", "∈": "in"}


def is_charge(left: str, right: str) -> bool:
    """Whether a hyphen between these two texts is the charge of an ion or belongs to a blood group: Cl-, O-."""
    return not right[:1].isalnum() and not re.match(r" ?[-−–—+=\d]", right) and _ION.search(left) is not None


def spell_charge(match: re.Match[str]) -> str | None:
    """The charge of an ion: "two minus" in SO4^2-. None if no formula stands before it."""
    if not _FORMULA.search(before(match, 8)):
        return None
    number = match["number"]
    return f"{amount(number) if number else ''} {'plus' if match['charge'] == '+' else 'minus'}".strip()


def stars(match: re.Match[str]) -> str:
    """★★★★☆ as "four out of five stars"."""
    full, every = match.group().count("★"), len(match.group())
    if full == every:
        return f"{cardinal(full)} stars"
    return f"{cardinal(full)} out of {cardinal(every)} stars"


def _bind(text: str) -> str:
    pieces = re.findall(r"\d+|[A-Za-z]+|[=∞−+∈-]", text)
    return " ".join(amount(one) if one.isdecimal() else _BOUND_WORDS.get(one, one) for one in pieces)


def _sum(match: re.Match[str]) -> str:
    """A sum, product or integral with its bounds: Σ_{i=1}^{n} as "the sum from i equals one to n of"."""
    words = f"{_SUMS[match['sign']]} {'from' if match['last'] else 'over'} {_bind(match['first'])}"
    if match["last"]:
        words += f" to {_bind(match['last'])}"
    return words if re.match(r" of\b", after(match, 4)) else f"{words} of"


def delimits(match: re.Match[str]) -> bool:
    """Whether a dollar sign is one of the two around a formula: $x^2$."""
    text, place = match.string, match.start()
    if _FORMULA_INSIDE.match(text, place):
        return True
    opened = text.rfind("$", max(place - 80, 0), place)
    found = _FORMULA_INSIDE.match(text, opened) if opened >= 0 else None
    return found is not None and found.end() == match.end()


_FORMULA_INSIDE = re.compile(r"\$(?=[A-Za-z\\(|√∑Σα-ω])(?:[A-Za-z](?![A-Za-z])|[^$\sA-Za-z]|\\[a-z]{1,12}| (?![ $])){1,60}\$(?!\d)")
CHARGES: tuple[Form, ...] = (form(r"\^\(?(?P<number>\d{0,2})(?P<charge>[-−+])\)?(?![\w(]| ?[\d(])", spell_charge),)
DECREMENTS: tuple[Form, ...] = (
    form(r"(?<=[a-z])(?<![A-Za-z'_][a-z])(?<!\ba)--(?=[;,.)]|$| (?![A-Za-z] )[a-z]| *\))", "minus minus"),
    form(r"(?<=[\w)] )[-−]=(?= )", "minus equals"),
)
SUMS: tuple[Form, ...] = (form(r"(?P<sign>[Σ∑∏Π∫])_\(?(?P<first>[^()\s^]{1,12})\)?(?:\^\(?(?P<last>[^()\s]{1,8})\)?)?(?=[\s(]|$)", _sum),)
PIPES: tuple[Form, ...] = (form(rf"(?<!\S)\|(?= (?:{_COMMANDS})\b)", "pipe"),)
PER_UNITS: tuple[Form, ...] = (
    form(
        r"(?<=[a-z]{3})/(?P<unit>mL|ml|μL|dL|L|kg|km²|m²|m³|mm³|cm²|cm³|ha|min|GB|MB)(?![\w/²³])",
        lambda match: f"per {unit_names(match['unit'])[0]}",
    ),
)
"""Units after a thing that is counted: cells/mL."""
STARS: tuple[Form, ...] = (form(r"[★☆]{2,}", stars),)
