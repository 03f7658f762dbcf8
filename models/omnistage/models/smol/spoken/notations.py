"""Characters of HTML and formulas in LaTeX, as models write them, within a text that is still being written: both are replaced by what they
mean, a formula by its words, before anything else reads the text."""

from __future__ import annotations

import html
import re
import string
from collections.abc import Callable, Iterator
from typing import NamedTuple

from omnistage.models.smol.spoken.characters import BLANK, GREEK, SIGN_WORDS
from omnistage.models.smol.spoken.numbers import amount, fraction
from omnistage.models.smol.spoken.rules import read_table

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


def _display_formula(text: str) -> str | None:
    """The words of a formula between two marks of two characters. None if nothing in it is mathematics."""
    inside = text[2:-2].strip()
    is_mathematics = _MATHEMATICS.search(inside) or _LONE.fullmatch(inside)
    return (spell_formula(inside) or None) if is_mathematics else None


def _inline_formula(text: str) -> str | None:
    """The words of a formula between two dollar signs. None for two prices."""
    inside = text[1:-1]
    if _LONE.fullmatch(inside):
        return spell_formula(inside)
    has_words = _WORD.search(re.sub(r"\{[^{}]*\}", "", inside)) or re.fullmatch(r"\d.*\W[A-Z]{1,3}", inside)
    if _UNFINISHED.search(inside) or has_words:
        return None
    may_be_price = inside[0].isdecimal() or re.search(r"(?<![A-Za-z\\])[A-Za-z]{2}", inside)
    is_formula = (_EQUATION if may_be_price else _MATHEMATICS).search(inside)
    return (spell_formula(inside) or None) if is_formula else None


class _Notation(NamedTuple):
    """begins: matches a text that may become one. pattern: matches a whole one. replace: returns what it means, or None if it is none."""

    begins: re.Pattern[str]
    pattern: re.Pattern[str]
    replace: Callable[[str], str | None]


def _notation(pattern: str, begins: str, replace: Callable[[str], str | None]) -> _Notation:
    return _Notation(re.compile(begins), re.compile(pattern), replace)


_NOTATIONS = (
    _notation(
        rf"&(?:#\d{{1,7}}|#[xX][0-9A-Fa-f]{{1,6}}|[A-Za-z]\w{{1,{MAX_ENTITY}}});",
        rf"&(?:#\w{{0,8}}|[A-Za-z]\w{{0,{MAX_ENTITY}}})?",
        _entity,
    ),
    _notation(rf"\$\${_LINES}\$\$", rf"\$(?:\${_LINES}\$?\\?)?", _display_formula),
    _notation(rf"\\\({_LINES}\\\)", rf"\\(?:\({_LINES}\\?)?", _display_formula),
    _notation(rf"\\\[{_LINES}\\\]", rf"\\(?:\[{_LINES}\\?)?", _display_formula),
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
        self._held_text = ""  # Characters that may become a notation.
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
        while self._held_text:
            self._give_up(self._held_text, self._at, out)
        return out

    def _read(self, character: str, place: int, out: list[tuple[str, int]]) -> None:
        """Read a character that may begin a notation, or go on with one."""
        if not self._held_text and (character not in _OPENERS or (character == "$" and self._last.isalnum())):
            out.append((character, place))
            self._last = character
            return
        text = self._held_text + character
        for notation in _NOTATIONS:
            replacement = notation.replace(text) if notation.pattern.fullmatch(text) else None
            if replacement is not None:
                out.extend((one, place - len(text) + 1) for one in self._write(text, replacement))
                self._held_text, self._last = "", character
                return
        if any(notation.begins.fullmatch(text) for notation in _NOTATIONS):
            self._held_text = text
        else:
            self._give_up(text, place, out)

    def _give_up(self, text: str, last: int, out: list[tuple[str, int]]) -> None:
        """Put out the first character of a text that begins no notation, or a backslash with the opener that it escapes. Read the others
        again, because a notation may begin at each. last: the place of the last character of the text."""
        first = last - len(text) + 1
        length = 2 if _ESCAPED.match(text) else 1
        out.extend((character, first + number) for number, character in enumerate(text[:length]))
        self._held_text, self._last = "", text[length - 1]
        for place, character in enumerate(text[length:], first + length):
            self._read(character, place, out)


def escaped(notation: str, meaning: str) -> str:
    """The text for a notation within Markdown: the character of an entity is no mark there."""
    return f"\\{meaning}" if notation[0] == "&" and meaning in string.punctuation else meaning


def read_notations(text: str) -> str:
    """A whole text with its notations replaced. Its number of words between spaces stays: BLANK joins the words of a meaning, and stands
    for a further word at each space of the notation."""
    if not any(opener in text for opener in _OPENERS):
        return text
    notations = Notations(lambda notation, meaning: BLANK.join(meaning.split()) + f" {BLANK}" * len(re.findall(r"\s+", notation)))
    return "".join(character for character, _ in (*notations.feed(text), *notations.flush()))


# Formulas ----------------------------------------------------------------------------------------------------------------------------


_MAX_DEPTH = 24
"""Braces within more braces than that are not read as groups."""
_WORDS = read_table("latex.tsv") | {f"\\{kind}{word}": word for word in GREEK.values() for kind in ("", "var")}
_WORDS |= {f"\\{word.capitalize()}": word for word in GREEK.values()}
_LARGE = {"\\sum": "the sum", "\\prod": "the product", "\\int": "the integral", "\\iint": "the double integral", "\\oint": "the integral"}
_LARGE |= {"\\lim": "the limit", "\\max": "the maximum", "\\min": "the minimum", "\\bigcup": "the union", "\\bigcap": "the intersection"}
_SUFFIXES = {"\\hat": "hat", "\\widehat": "hat", "\\bar": "bar", "\\overline": "bar", "\\tilde": "tilde"}
_SUFFIXES |= {"\\dot": "dot", "\\ddot": "double dot"}
_PREFIXES = {"\\vec": "vector", "\\overrightarrow": "vector"}
_FRACTIONS = frozenset(("\\frac", "\\dfrac", "\\tfrac", "\\cfrac"))
_CHOICES = frozenset(("\\binom", "\\dbinom", "\\tbinom"))
_TEXT = re.compile(r"\\(?:text[a-z]*|mathrm|operatorname|mbox)\*? ?\{([^{}]*)\}")
_UNHEARD = frozenset(
    (
        *("\\left", "\\right", "\\big", "\\Big", "\\bigg", "\\Bigg", "\\bigl", "\\bigr", "\\displaystyle", "\\limits", "\\nonumber"),
        *("\\quad", "\\qquad", "\\,", "\\;", "\\:", "\\!", "\\ ", "\\{", "\\}", "\\mathbf", "\\mathbb", "\\mathcal", "\\mathit", "\\boxed"),
        *("\\hline", "\\underline", "\\overbrace", "\\underbrace", "\\rfloor", "\\rceil", "&", "~", "$", "\\"),
    )
)
_FUNCTIONS = frozenset("fghFGHPE")
_ROOTS = {"2": "the square root of", "3": "the cube root of"}
_POWERS = {"2": "squared", "3": "cubed", "\\circ": "degrees", "\\prime": "prime", "'": "prime"}
_TOKEN = re.compile(
    r"\\(?:text[a-z]*|mathrm|operatorname|mbox|begin|end)\*? ?\{[^{}]*\}|\\[A-Za-z]+|\\.|(?:sin|cos|tan|log|ln|exp)(?![A-Za-z])"
    r"|\d+(?:,\d{3})*(?:\.\d+)?|\s+|.",
    re.DOTALL,
)


def spell_formula(formula: str) -> str:
    """A formula in words. formula: its LaTeX, without the marks around it."""
    words = " ".join(" ".join(_Formula(formula).words()).split())
    return re.sub(r" (?=[,.;:)])|(?<=\() |,$", "", words)


class _Formula:
    """Reads the tokens of one formula, from the first to the last."""

    def __init__(self, formula: str) -> None:
        self._tokens: list[str] = [token for token in _TOKEN.findall(formula) if not token.isspace()]
        self._at = 0
        self._depth = 0  # How many arguments and groups are within each other here.
        self._braces = 0  # How many groups are open.
        self._bars = 0

    def words(self) -> Iterator[str]:
        """Yield the words up to the brace that ends this group, or up to the end."""
        while self._at < len(self._tokens):
            token = self._next()
            if token == "}" and self._braces:
                return
            yield from self._read(token)

    def _next(self) -> str:
        self._at += 1
        return self._tokens[self._at - 1]

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _read(self, token: str) -> Iterator[str]:
        before = self._tokens[self._at - 2] if self._at > 1 else ""  # `_at` is the place after the token.
        if token == "{":
            yield from self._group_words()
        elif token == "^":
            yield self._power()
        elif token == "_":
            yield self._argument()
        elif token in _FRACTIONS:
            yield self._fraction()
        elif token in _CHOICES:
            yield f"{self._argument()} choose {self._argument()}"
        elif token == "\\sqrt":
            yield self._root()
        elif token in _LARGE:
            yield from self._large(_LARGE[token])
        elif text := _TEXT.fullmatch(token):
            yield text[1]
        elif token in _SUFFIXES:
            yield f"{self._argument()} {_SUFFIXES[token]}"
        elif token in _PREFIXES:
            yield f"{_PREFIXES[token]} {self._argument()}"
        elif token == "|" and self._bars % 2 == 0 and re.fullmatch(r"[\w)}]+", before):
            yield "given"
        elif token == "|":
            self._bars += 1
            yield "the absolute value of" if self._bars % 2 else ""
        elif token in _FUNCTIONS and self._is_applied():
            yield f"{token} of"
        elif token not in _UNHEARD and not token.startswith(("\\begin", "\\end")):
            yield (
                _WORDS.get(token)
                or _WORDS.get(f"\\{token}" if len(token) > 1 else token)  # A function without its backslash: sin.
                or (amount(token) if token[0].isdecimal() else token.strip("\\}"))
            )

    def _is_applied(self) -> bool:
        """Whether the letter that was read is a function of what follows: f(x), f'(x)."""
        return self._tokens[self._at : self._at + 1] == ["("]

    def _group_words(self) -> Iterator[str]:
        """The words of a group whose opening brace was read."""
        if self._depth < _MAX_DEPTH:
            self._depth, self._braces = self._depth + 1, self._braces + 1
            yield from self.words()
            self._depth, self._braces = self._depth - 1, self._braces - 1

    def _argument(self) -> str:
        """The words of the next token or group."""
        if self._peek() in ("", "}") or self._depth >= _MAX_DEPTH:
            return ""
        self._depth += 1
        words = " ".join(word for word in self._read(self._next()) if word)
        self._depth -= 1
        return words

    def _power(self) -> str:
        simple = self._simple()
        if simple in _POWERS:
            return _POWERS[simple]
        return f"to the power of {self._argument()}"

    def _simple(self) -> str:
        """The next token, or the only one in the next group, if it has a word as a power; else empty, and nothing was read."""
        braced = self._tokens[self._at : self._at + 3]
        token = braced[1] if len(braced) == 3 and braced[0] == "{" and braced[2] == "}" else self._peek()
        if token not in _POWERS:
            return ""
        self._at += 3 if token != self._peek() else 1  # Three with the braces around it.
        return token

    def _fraction(self) -> str:
        begin = self._at
        over, under = self._argument(), self._argument()
        numbers = [token for token in self._tokens[begin : self._at] if token not in "{}"]
        if len(numbers) == 2 and all(re.fullmatch("[1-9]\\d?", number) for number in numbers) and numbers[1] != "1":
            return fraction(int(numbers[0]), int(numbers[1]))
        return f"{over}, all over {under}," if " " in over else f"{over} over {under}"

    def _root(self) -> str:
        degree = "2"
        if self._peek() == "[":
            inside = []
            while self._peek() and (token := self._next()) != "]":
                inside.append(token.strip("[\\"))
            degree = "".join(inside)
        return f"{_ROOTS.get(degree) or f'the root of order {degree} of'} {self._argument()}"

    def _large(self, name: str) -> Iterator[str]:
        """A sum, a product, an integral or a limit, with its bounds."""
        bounds = dict[str, str]()
        while self._peek() in ("_", "^", "\\limits"):
            sign = self._next()
            if sign != "\\limits":
                bounds[sign] = self._argument()
        yield name
        if "_" in bounds:
            preposition = "from" if "^" in bounds else "over"
            yield f"{'as' if name == 'the limit' else preposition} {bounds['_']}"
        if "^" in bounds:
            yield f"to {bounds['^']}"
        yield "of"
