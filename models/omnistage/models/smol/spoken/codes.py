"""Digits that are no amount: telephone numbers, addresses of machines, versions, models, codes."""

from __future__ import annotations

import re

from omnistage.models.smol.spoken.numbers import ONES, amount, bare, cardinal, digits, letters, name, ordinal, parse_number, plural
from omnistage.models.smol.spoken.rules import Spell


def _grouped(text: str) -> str:
    """Groups of digits, digit by digit, with a rest between two groups."""
    words = ", ".join(digits(group) or "X" for group in re.findall(r"\d+|X$", text))
    return f"plus {words}" if text[0] == "+" else words


def _signs(text: str) -> str:
    """Pairs or groups of signs, sign by sign: the address of a network card, a UUID."""
    return ", ".join(" ".join(ONES[int(one)] if one.isdecimal() else one.upper() for one in group) for group in re.split("[:-]", text))


def _digits_and_letters(text: str) -> str:
    """Digits of any base, and the colons of an IPv6 address, sign by sign."""
    return " ".join("colon" if one == ":" else ONES[int(one)] if one.isdecimal() else letters(one) for one in text)


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


SPELLINGS: dict[str, Spell] = {
    "grouped": _grouped,
    "digits": digits,
    "signs": _signs,
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
