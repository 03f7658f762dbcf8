"""Amounts with what they count: money, units, percent, degrees, sizes, fractions."""

from __future__ import annotations

import functools
import re

from omnistage.models.smol.spoken.characters import FRACTIONS
from omnistage.models.smol.spoken.numbers import NUMBER, WrittenNumber, amount, bare, cardinal, fraction, parse_number, plural, table
from omnistage.models.smol.spoken.rules import Say, Spell, alternatives, is_kind, read_lists, read_rows, read_short_forms

CURRENCIES = {sign: (one, plural_name, coin, coins) for sign, one, plural_name, coin, coins in read_rows("currencies.tsv")}
"""By sign or code: the singular and plural of the money, then of its small coins; empty for money that has none."""


UNITS = {sign: (one, plural_name) for sign, one, plural_name in read_rows("units.tsv")}
"""By the sign of each unit: its singular and its plural."""
_ATOM = alternatives(sign for sign in UNITS if " " not in sign)
_SPACED = alternatives(sign for sign in UNITS if " " in sign).replace("\\ ", r"\.? ")
_POWER = r"(?:²|³|\^[23]|[23](?!\d))"
UNIT = rf"(?:{_SPACED}|(?:{_ATOM}){_POWER}?(?:[/·](?:{_ATOM}){_POWER}?)?)"
"""A pattern for a unit after a number."""
_SHORT_LONE = table("km cm mm kg kW μm μg μs mph kph mpg rpm fps dpi ppi bpm psi")
LONE_UNITS = frozenset(sign for sign in UNITS if len(sign) > 2 and not sign.islower() and sign not in ("MeV", "GeV")) | frozenset(
    _SHORT_LONE
)
LONE_UNIT = rf"(?:(?:{_ATOM})/(?:{_ATOM}){_POWER}?|(?:[kcm]?m|ft|mi)[²³]|{alternatives(LONE_UNITS)})"
"""A pattern for a unit that needs no number before it."""
_UNIT_PARTS = re.compile(rf"({_ATOM})({_POWER})?(?:([/·])({_ATOM})({_POWER})?)?")
_POWERS = {"2": "square", "²": "square", "3": "cubic", "³": "cubic"}


@functools.lru_cache(maxsize=512)
def unit_names(unit: str) -> tuple[str, str]:
    """The singular and the plural of a unit: "m/s²" as "meter per second squared" and "meters per second squared"."""
    if (spaced := unit.replace(".", "")) in UNITS:
        return UNITS[spaced]
    match = _UNIT_PARTS.fullmatch(unit)
    assert match is not None
    sign, power, operator, second_sign, second_power = match.groups()
    kind = f"{_POWERS[power[-1]]} " if power else ""
    one, plural_name = (kind + name for name in UNITS[sign])
    if not second_sign:
        return one, plural_name
    tail = UNITS[second_sign][0]
    if second_power:
        square = second_power[-1] in "2²"
        tail = f"{tail} {'squared' if square else 'cubed'}" if tail == "second" else f"{_POWERS[second_power[-1]]} {tail}"
    if operator == "·":
        return f"{one} {tail}", f"{one} {tail}s"
    return f"{one} per {tail}", f"{plural_name} per {tail}"


_SHORT_FORMS = read_short_forms()
_SCALES, _PER_WORDS = _SHORT_FORMS["scale"], _SHORT_FORMS["price"]
_FRACTION_PARTS = read_lists()["fraction parts"]
_PRICED_THING = re.compile(rf"[ -](?:{'|'.join(read_lists()['priced things'])})s?\b")


def _money(match: re.Match[str]) -> str:
    """A price in words, or a range of prices; two digits after the point are its small coins."""
    groups = match.groupdict()
    names = CURRENCIES[groups.get("code") or groups["sign"].rstrip(".")]
    one, plural_name, small, _ = names
    number = parse_number(groups["number"])
    if one == "euro" and re.fullmatch(r"\d{1,3}\.\d{3}", groups["number"]):  # There the full stop groups digits.
        number = parse_number(groups["number"].replace(".", ","))
    short = groups.get("short") or groups.get("far")
    scale = groups.get("scale") or (_SCALES[short.lower()] if short else "")
    is_of_thing = _PRICED_THING.match(match.string, match.end()) or is_kind(match)  # A five dollar bill.
    if groups.get("last"):
        words = f"{amount(number)} to {amount(groups['last'])} {scale} {plural_name}".replace("  ", " ")
    elif scale:
        words = f"{amount(number)} {scale} {one if is_of_thing else plural_name}"
    elif len(number.part) == 2 and small:
        words = _with_coins(number, names)
    else:
        words = f"{amount(number)} {one if number.is_one or is_of_thing else plural_name}"
    per = groups.get("per")
    return f"{words} {'' if per == 'ea' else 'per '}{_PER_WORDS.get(per, per)}" if per else words


def _with_coins(number: WrittenNumber, names: tuple[str, str, str, str]) -> str:
    """A price with its small coins: 5.50 as "five dollars and fifty cents". names: as in CURRENCIES."""
    one, plural_name, small_one, small_many = names
    coins = int(number.part)
    small = f"{cardinal(coins)} {small_one if coins == 1 else small_many}"
    if coins and not number.whole_digits.strip("0"):
        return small
    large = f"{amount(number._replace(part=''))} {one if number.whole_digits == '1' else plural_name}"
    return f"{large} and {small}" if coins else large


def _plural_number(number: str) -> str:
    """The plural of a number: two 6s, 1,000s."""
    parsed = parse_number(number)
    words = amount(parsed) if parsed.grouped or not number.isdecimal() else bare(number)
    # 1,000s are "thousands".
    return plural(words.removeprefix("one ") if parsed.whole_digits.rstrip("0") == "1" else words)


_HEAT = {"C": "Celsius", "F": "Fahrenheit", "K": "Kelvin", "N": "north", "S": "south", "E": "east", "W": "west"}


def _fraction(text: str) -> str:
    """2/3 or ⅔ as "two thirds"."""
    over, under = FRACTIONS[text] if text in FRACTIONS else map(int, text.split("/"))
    return fraction(over, under)


def _proper_fraction(text: str) -> str | None:
    """A fraction between 0 and 1; None for any other."""
    over, under = FRACTIONS[text] if text in FRACTIONS else map(int, text.split("/"))
    return fraction(over, under) if 0 < over < under else None


def _part_of_one(text: str) -> str | None:
    """A fraction after a whole number: 2 1/2."""
    words = _proper_fraction(text)
    return "a half" if words == "one half" else words


def _common_fraction(text: str) -> str | None:
    """A fraction whose under part is one that people use, or 1/250. None for others, which may be days."""
    over, under = map(int, text.split("/"))
    return fraction(over, under) if 0 < over < under and (str(under) in _FRACTION_PARTS or (over == 1 and under > 31)) else None


def _quotient(text: str) -> str:
    """A fraction in an equation."""
    over, under = map(int, text.split("/"))
    return fraction(over, under) if over < under else f"{cardinal(over)} divided by {cardinal(under)}"


PATTERNS = {
    "number": NUMBER,
    "unit": UNIT,
    "letter unit": f"[{''.join(unit for unit in UNITS if len(unit) == 1 and unit.isupper() and unit.isascii())}t]",
    "lone unit": LONE_UNIT,
    "money signs": alternatives(sign for sign in CURRENCIES if not sign.isalpha() and sign != "¢"),
    "money names": alternatives(sign for sign in CURRENCIES if sign.isalpha() and sign != "Rs"),
    "money codes": alternatives(sign for sign in CURRENCIES if sign.isalpha() and sign.isupper() and len(sign) == 3),
}
SPELLINGS: dict[str, Spell] = {
    "scale": lambda short: _SCALES[short.lower()],
    "money": lambda sign: CURRENCIES[sign][1],
    "unit": lambda unit: unit_names(unit)[0],
    "units": lambda unit: unit_names(unit)[1],
    "scale of heat": _HEAT.__getitem__,
    "fraction": _fraction,
    "proper fraction": _proper_fraction,
    "part of one": _part_of_one,
    "common fraction": _common_fraction,
    "quotient": _quotient,
    "parts": lambda under: fraction(2, int(under)).removeprefix("two "),
    "plural": _plural_number,
}
NOUNS = {"unit": unit_names}
FUNCTIONS: dict[str, Say] = {"money": _money, "negative amount": lambda match: f"minus {_money(match)}"}
