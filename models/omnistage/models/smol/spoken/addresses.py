"""Addresses: web addresses, mail, files, names of accounts and topics."""

from __future__ import annotations

import re

from omnistage.models.smol.spoken.numbers import bare, digits, letters
from omnistage.models.smol.spoken.rules import Spell
from omnistage.models.smol.spoken.tables import read_lists

_SPELLED = read_lists()["spelled extensions"]
_SIGNS = {
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
    "'": "",
    "(": "",
    ")": "",
    "!": "",
    ";": "",
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
        elif piece in _SIGNS:
            words.append(_SIGNS[piece])
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


SPELLINGS: dict[str, Spell] = {"spell": spell, "host": _host, "snake": _snake}
