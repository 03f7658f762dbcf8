"""The forms that are read sign by sign: signs that take more than a row, such as powers, sums, absolute values and ranges; addresses of
web, mail and files; and digits that are no amount, such as telephone numbers, versions and codes."""

from __future__ import annotations

import re

from omnistage.models.smol.spoken.characters import CURRENCY_SIGNS, GREEK, SUPERSCRIPTS
from omnistage.models.smol.spoken.numbers import amount, bare, cardinal, digits, letters, name, ordinal, parse_number, plural
from omnistage.models.smol.spoken.rules import Say, Spell, after, before, read_lists, read_short_forms

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
        count = amount(power[:-1]) if power[:-1].isdecimal() else ""
        return f"{count} {'plus' if power[-1] == '+' else 'minus'}".strip()
    sign = "minus " if power[0] in "-−" else ""
    number = power.lstrip("-−+")
    return f"to the power of {sign}{amount(number) if number.isdecimal() else number}".rstrip()


def _plain(power: str) -> str:
    return "".join(SUPERSCRIPTS.get(one, one) for one in power)


def _stars(match: re.Match[str]) -> str:
    """★★★★☆ as "four out of five stars"."""
    black, total = match.group().count("★"), len(match.group())
    return f"{cardinal(black)} stars" if black == total else f"{cardinal(black)} out of {cardinal(total)} stars"


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
    opener_place = match.string.rfind("|", max(match.start() - 30, 0), match.start())
    absolute = _ABSOLUTE.match(match.string, opener_place) if opener_place >= 0 else None
    return "" if absolute and absolute.end() == match.end() else ","


# Addresses ---------------------------------------------------------------------------------------------------------------------------


_SPELLED = read_lists()["spelled extensions"]
_SIGN_NAMES = {
    ".": "dot",
    "/": "slash",
    "\\": "backslash",
    "-": "dash",
    "_": "underscore",
    "@": "at",
    ":": "colon",
    "~": "tilde",
    "+": "plus",
    "#": "hash",
    "?": "question mark",
    "=": "equals",
    "&": "and",
    "%": "percent",
    "*": "star",
    "$": "dollar",
    ",": "comma",
    **dict.fromkeys("'()!;", ""),
}
_PIECES = re.compile(r"[A-Za-zÀ-ÖØ-öø-ÿ]+|\d+|.")
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def spell(text: str) -> str:
    """A name of a machine, a file or an account in words, every sign by its name."""
    words = []
    pieces = _PIECES.findall(text)
    for place, piece in enumerate(pieces):
        if piece.isdecimal():
            words.append(digits(piece) if len(piece) > 4 else bare(piece))
        elif piece in _SIGN_NAMES:
            words.append(_SIGN_NAMES[piece])
        elif place and pieces[place - 1] == "." and piece.lower() in _SPELLED:
            words.append(letters(piece))
        else:
            words.append(_CAMEL.sub(" ", piece) if piece.isalpha() else "")
    return " ".join(word for word in words if word)


def _host(host: str) -> str:
    """The host of a web address, without a "www."."""
    return spell(re.sub(r"(?i)^www\.", "", host))


def _snake(text: str) -> str:
    return spell(text).replace(" underscore", "")


# Digits that are no amount -----------------------------------------------------------------------------------------------------------


def _grouped(text: str) -> str:
    """Groups of digits, digit by digit, with a rest between two groups."""
    words = ", ".join(digits(group) or "X" for group in re.findall(r"\d+|X$", text))
    return f"plus {words}" if text[0] == "+" else words


def _sign_groups(text: str) -> str:
    """Pairs or groups of signs, sign by sign: the address of a network card, a UUID."""
    groups = ([digits(sign) or sign.upper() for sign in group] for group in re.split("[:-]", text))
    return ", ".join(map(" ".join, groups))


def _digits_and_letters(text: str) -> str:
    """Digits of any base, and the colons of an IPv6 address, sign by sign."""
    return " ".join("colon" if sign == ":" else digits(sign) or letters(sign) for sign in text)


def _machine(host: str) -> str:
    """The host of an IPv4 address: 192.168.1.1."""
    return " dot ".join(cardinal(int(part)) for part in host.split("."))


def _version(number: str) -> str:
    return " point ".join(digits(part) if part[0] == "0" and len(part) > 1 else amount(part) for part in number.split("."))


def _label(text: str) -> str:
    """The label of a version: -rc.1 as "R.C. one", +build.5 as "plus build five"."""
    words = []
    for piece in re.findall(r"[A-Za-z]+|\d+|[+]", text):
        if piece.isdecimal():
            words.append(name(piece))
        elif piece == "+":
            words.append("plus")
        else:
            words.append(letters(piece) if len(piece) < 3 or not re.search("[aeiouy]", piece, re.IGNORECASE) else piece)
    return " ".join(words)


def _list(text: str) -> str | None:
    """Numbers with commas between them: 1,2,3. None if the commas group digits."""
    return None if parse_number(text).grouped else ", ".join(map(bare, text.split(",")))


def _places(text: str) -> str:
    """1,2-dichloroethane: the numbers of atoms, one by one."""
    return " ".join(cardinal(int(part)) for part in text.split(","))


def _tail(text: str) -> str:
    """The letters after a number: read one by one if they are capital letters and few."""
    return letters(text) if text.isupper() and len(text) <= 3 else text


# For the rules -----------------------------------------------------------------------------------------------------------------------


PATTERNS = {
    "money sign": f"[{re.escape(CURRENCY_SIGNS)}]",
    "greek letter": f"[{''.join(GREEK)}]",
    "power sign": f"[{''.join(SUPERSCRIPTS)}]",
}
SPELLINGS: dict[str, Spell] = {
    "power": _power,
    "number of power": lambda text: amount(_plain(text)),
    "ordinal power": lambda text: ordinal(int(_plain(text))) if _plain(text).isdecimal() else _plain(text),
    "spell": spell,
    "host": _host,
    "snake": _snake,
    "grouped": _grouped,
    "digits": digits,
    "signs": _sign_groups,
    "digits and letters": _digits_and_letters,
    "machine": _machine,
    "ordinal": lambda number: ordinal(int(number.replace(",", ""))),
    "places": _places,
    "list": _list,
    "name": name,
    "names": lambda text: plural(name(text)),
    "version": _version,
    "label": _label,
    "tail": _tail,
}
FUNCTIONS: dict[str, Say] = {"ascending": _ascending, "bar": _bar, "stars": _stars, "sum": _sum}
