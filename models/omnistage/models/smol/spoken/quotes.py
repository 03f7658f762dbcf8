"""Quotations that span several phrases: if one is open, a mark after a digit may end it; else the mark means inches or feet."""

from __future__ import annotations

import re

from omnistage.models.smol.spoken.quantities import is_sized

CLOSING = "”"
"""The character for a straight mark that ends a quotation."""
_MARKS = {
    '"': re.compile(r"(?P<opens>(?<![^\s('“—-])\"(?=[\w$£€'(.-]))|(?P<digit>(?<=\d)\"(?!\w))|(?<=[^\s(])\"(?!\w)"),
    "'": re.compile(r"(?P<opens>(?<![^\s(\"“—-])'(?=[A-Za-z(]))|(?P<digit>(?<=\d)'(?!\w))|(?<=[^\s(])'(?!\w)"),
}


class Quotation:
    """Remembers which quotations of earlier phrases are open."""

    def __init__(self) -> None:
        self._open = set[str]()  # The marks (" or ') of the open quotations.

    def read(self, phrase: str) -> str:
        """Read the next phrase and return it. A straight mark after a digit that ends a quotation of an earlier phrase becomes CLOSING."""
        for sign, marks in _MARKS.items():
            if sign in phrase:
                phrase = self._read_marks(phrase, sign, list(marks.finditer(phrase)))
        return phrase

    def end(self) -> None:
        """A paragraph ends, and with it the quotations that are open in it."""
        self._open.clear()

    def _read_marks(self, phrase: str, sign: str, found: list[re.Match[str]]) -> str:
        """Do the work of `read` for one kind of mark. sign: the mark. found: where it stands in the phrase."""
        is_open, is_earlier = sign in self._open, sign in self._open
        for place, mark in enumerate(found):
            if mark["opens"]:
                is_open, is_earlier = True, False
            elif not mark["digit"]:
                is_open = False
            elif is_open:
                following = found[place + 1] if place + 1 < len(found) else None
                if (following and not following["opens"]) or is_sized(phrase, *mark.span()):
                    continue
                is_open = False
                if is_earlier:
                    phrase = phrase[: mark.start()] + CLOSING + phrase[mark.end() :]
        (self._open.add if is_open else self._open.discard)(sign)
        return phrase
