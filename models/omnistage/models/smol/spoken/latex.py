"""Formulas in LaTeX, as models write them, in words."""

from __future__ import annotations

import re
from collections.abc import Iterator

from omnistage.models.smol.spoken.characters import GREEK
from omnistage.models.smol.spoken.numbers import amount, fraction
from omnistage.models.smol.spoken.tables import read_table

_MAX_DEPTH = 24
"""Braces within more braces than that are not read as groups."""
_WORDS = read_table("latex.tsv") | {f"\\{kind}{word}": word for word in GREEK.values() for kind in ("", "var")}
_WORDS |= {f"\\{word.capitalize()}": word for word in GREEK.values()}
_LARGE = {"\\sum": "the sum", "\\prod": "the product", "\\int": "the integral", "\\iint": "the double integral", "\\oint": "the integral"}
_LARGE |= {"\\lim": "the limit", "\\max": "the maximum", "\\min": "the minimum", "\\bigcup": "the union", "\\bigcap": "the intersection"}
_BEHIND = {
    "\\hat": "hat",
    "\\widehat": "hat",
    "\\bar": "bar",
    "\\overline": "bar",
    "\\tilde": "tilde",
    "\\dot": "dot",
    "\\ddot": "double dot",
}
_BEFORE = {"\\vec": "vector", "\\overrightarrow": "vector"}
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
        elif token in _BEHIND:
            yield f"{self._argument()} {_BEHIND[token]}"
        elif token in _BEFORE:
            yield f"{_BEFORE[token]} {self._argument()}"
        elif token == "|" and self._bars % 2 == 0 and re.fullmatch(r"[\w)}]+", "".join(self._tokens[max(self._at - 2, 0) : self._at - 1])):
            yield "given"
        elif token == "|":
            self._bars += 1
            yield "the absolute value of" if self._bars % 2 else ""
        elif token in _FUNCTIONS and self._is_applied():
            yield f"{token} of"
        elif token not in _UNHEARD and not token.startswith(("\\begin", "\\end")):
            yield (
                _WORDS.get(token)
                or _WORDS.get(f"\\{token}" if len(token) > 1 else token)
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
        self._at += 3 if token != self._peek() else 1
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
            yield f"{'as' if name == 'the limit' else 'from' if '^' in bounds else 'over'} {bounds['_']}"
        if "^" in bounds:
            yield f"to {bounds['^']}"
        yield "of"
