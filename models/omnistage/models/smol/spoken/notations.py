"""Characters of HTML and formulas in LaTeX within a text that is still being written: both are replaced by what they mean, before anything
else reads the text."""

from __future__ import annotations

import html
import re
import string
from collections.abc import Callable
from typing import NamedTuple

from omnistage.models.smol.spoken.characters import GREEK, LOST, SIGN_WORDS
from omnistage.models.smol.spoken.latex import spell_formula

MAX_ENTITY = 32
MAX_INLINE = 200
MAX_FORMULA = 1000
"""Longer ones are no entities and no formulas, in characters: no more than that is held back."""
_BRACED = r" ?\{[A-Za-z ]{0,60}\}"
_COMMAND = rf"\\[A-Za-z]{{1,20}}(?![A-Za-z])(?:{_BRACED}|(?!{_BRACED}))"
_LETTERS = rf"(?:{_COMMAND}|\\[^A-Za-z()\[\]\n]|[A-Za-z]{{1,3}}(?![A-Za-z])|[^$`\\A-Za-z\n]){{0,{MAX_INLINE}}}"
"""A formula between single dollar signs: few letters together, commands, signs and digits, and no words. Each text has one way to match:
with two ways for a command, a formula of 20 commands would take a million times as long as one of 10."""
_WORD = re.compile(r"(?<![A-Za-z\\])(?:an?|and|at|by|for|in|is|of|on|or|per|the|to|via|was|with|vs) (?![-+=<>*/^_\\])")
"""Words between two prices."""
_EQUATION = re.compile(r"[=^_\\<>≤≥≠≈]")
_LINES = rf"(?:[^$`\\\n]|\\[^()\[\]]|\n(?!\n)){{0,{MAX_FORMULA}}}"
_MATHEMATICS = re.compile(rf"\\[A-Za-z]{{2}}|[=^_+<>×|/*{''.join(SIGN_WORDS)}{''.join(GREEK)}-]")
_LONE = re.compile(
    r"\d*[A-Za-z]{1,3}(?:'{1,2}|!)?(?:\(\w\))?|\d+(?:\.\d+)?(?:[:/]\d+)?[°%!]?|[\[({]-?\d+(?:\.\d+)?(?:, ?-?\d+(?:\.\d+)?){1,5}[\])}]"
)
"""A formula without an operator: a variable, a number, a pair."""
_UNFINISHED = re.compile(r"[-+*/=<>^_,.;:(\s]$")


def _entity(text: str) -> str | None:
    """The character of an entity; None for a name that is none."""
    character = html.unescape(text)
    return character if character != text else None


def _formula(text: str) -> str | None:
    """The words of a formula between two marks of two characters. None if nothing in it is mathematics."""
    inside = text[2:-2].strip()
    return spell_formula(inside) or None if _MATHEMATICS.search(inside) or _LONE.fullmatch(inside) else None


def _inline_formula(text: str) -> str | None:
    """The words of a formula between two dollar signs. None for two prices."""
    inside = text[1:-1]
    if _LONE.fullmatch(inside):
        return spell_formula(inside)
    is_word = _WORD.search(re.sub(r"\{[^{}]*\}", "", inside)) or re.fullmatch(r"\d.*\W[A-Z]{1,3}", inside)
    if _UNFINISHED.search(inside) or is_word:
        return None
    letters = inside[0].isdecimal() or re.search(r"(?<![A-Za-z\\])[A-Za-z]{2}", inside)
    return spell_formula(inside) or None if (_EQUATION if letters else _MATHEMATICS).search(inside) else None


class _Notation(NamedTuple):
    """begins: matches a text that may become one. whole: matches a complete one. replace: returns what it means, or None if it is none."""

    begins: re.Pattern[str]
    whole: re.Pattern[str]
    replace: Callable[[str], str | None]


def _notation(pattern: str, begins: str, replace: Callable[[str], str | None]) -> _Notation:
    return _Notation(re.compile(begins), re.compile(pattern), replace)


_NOTATIONS = (
    _notation(
        rf"&(?:#\d{{1,7}}|#[xX][0-9A-Fa-f]{{1,6}}|[A-Za-z]\w{{1,{MAX_ENTITY}}});",
        rf"&(?:#\w{{0,8}}|[A-Za-z]\w{{0,{MAX_ENTITY}}})?",
        _entity,
    ),
    _notation(rf"\$\${_LINES}\$\$", rf"\$(?:\${_LINES}\$?\\?)?", _formula),
    _notation(rf"\\\({_LINES}\\\)", rf"\\(?:\({_LINES}\\?)?", _formula),
    _notation(rf"\\\[{_LINES}\\\]", rf"\\(?:\[{_LINES}\\?)?", _formula),
    _notation(rf"\$(?![\s$]){_LETTERS}\$", rf"\$(?![\s$]){_LETTERS}(?:\\[A-Za-z]{{0,20}}(?: ?\{{[A-Za-z ]{{0,60}})?)?", _inline_formula),
)
_OPENERS = "&$\\"
_ESCAPED = re.compile(r"\\[&$\\]")
"""An opener behind a backslash begins no notation. Else each of a million of them would hold back those that follow."""


class Notations:
    """Reads one text. `feed` returns the characters that are certain by then, each with its place in the text; `flush` returns the rest.
    The text for a notation stands at the place where that begins. write: given a notation and its meaning, returns what is put out."""

    def __init__(self, write: Callable[[str, str], str] = lambda notation, meaning: meaning) -> None:
        self._write = write
        self._at = -1  # Place of the last character that was fed.
        self._held = ""  # Characters that may become a notation.
        self._last = ""  # The last character before them.

    def feed(self, text: str) -> list[tuple[str, int]]:
        """Read more of the text."""
        out = list[tuple[str, int]]()
        for character in text:
            self._at += 1
            self._read(character, self._at, out)
        return out

    def flush(self) -> list[tuple[str, int]]:
        """The text ends here."""
        out = list[tuple[str, int]]()
        while self._held:
            self._give_up(self._held, self._at, out)
        return out

    def _read(self, character: str, place: int, out: list[tuple[str, int]]) -> None:
        """Read a character that may begin a notation, or go on with one."""
        if not self._held and (character not in _OPENERS or (character == "$" and self._last.isalnum())):
            out.append((character, place))
            self._last = character
            return
        text = self._held + character
        for notation in _NOTATIONS:
            replacement = notation.replace(text) if notation.whole.fullmatch(text) else None
            if replacement is not None:
                out.extend((one, place - len(text) + 1) for one in self._write(text, replacement))
                self._held, self._last = "", character
                return
        if any(notation.begins.fullmatch(text) for notation in _NOTATIONS):
            self._held = text
        else:
            self._give_up(text, place, out)

    def _give_up(self, text: str, last: int, out: list[tuple[str, int]]) -> None:
        """No notation begins where this text does: put out its first character, or a backslash with the opener that it escapes, and read
        the others again, as one may begin at each of them. last: the place of its last character."""
        first = last - len(text) + 1
        length = 2 if _ESCAPED.match(text) else 1
        out.extend((character, first + number) for number, character in enumerate(text[:length]))
        self._held, self._last = "", text[length - 1]
        for place, character in enumerate(text[length:], first + length):
            self._read(character, place, out)


def escaped(notation: str, meaning: str) -> str:
    """The text for a notation within Markdown: the character of an entity is no mark there."""
    return f"\\{meaning}" if notation[0] == "&" and meaning in string.punctuation else meaning


def read_notations(text: str) -> str:
    """A whole text with its notations replaced. It has as many words between spaces as before: LOST stands between those that came to it,
    and for those that went."""
    if not any(opener in text for opener in _OPENERS):
        return text
    notations = Notations(lambda notation, meaning: LOST.join(meaning.split()) + f" {LOST}" * len(re.findall(r"\s+", notation)))
    return "".join(character for character, _ in (*notations.feed(text), *notations.flush()))
