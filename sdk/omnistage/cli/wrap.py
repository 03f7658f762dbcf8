"""Breaks text that comes in pieces into lines of a terminal; text that has been written is never changed."""

from __future__ import annotations

import re

from rich.cells import cell_len, chop_cells

from omnistage.host.terminal import ESCAPES

WIDE = "\u3000-\u30ff\u3400-\u9fff\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff"
"""Characters of scripts without spaces, as ranges of a regular expression: a line may be broken after each of them."""

TOKEN = re.compile(rf"\n|\s|[{WIDE}]|[^\s{WIDE}]+")
OPEN = re.compile(rf"[^\s{WIDE}]+")
"""A word at the end of a piece, which the next piece may continue."""

TAB = 4

UNSEEN = dict.fromkeys(ESCAPES)
"""Control characters, which are left out of an answer: a model's output must not steer a terminal."""


class Wrap:
    """Breaks a text between words. Lines stay one column short of the terminal's width: terminals differ in how they treat a cursor after
    the last column. columns: the present width of the terminal."""

    def __init__(self) -> None:
        self._column = 0
        self._gap = ""
        """Spaces that are written with the word after them, or not at all if that word begins a line."""
        self._word = ""

    @property
    def unfinished(self) -> str:
        """The last word, with the spaces before it, if the next piece may continue it; empty if the text ends after a whole word."""
        return self._gap + self._word if self._word else ""

    def add(self, text: str, columns: int) -> str:
        """Take the next piece of the text. Returns the text to write now, after all text that was written before."""
        limit = _limit(columns)
        tokens = TOKEN.findall(self._word + text.translate(UNSEEN))
        self._word = tokens.pop() if tokens and OPEN.fullmatch(tokens[-1]) else ""
        pieces = [self._place(token, limit) for token in tokens]
        pieces.append(self._make_room(limit))
        return "".join(pieces)

    def finish(self, columns: int) -> str:
        """End the text. Returns the text to write; the cursor is then at the beginning of a line."""
        word, self._word = self._word, ""
        text = self._place(word, _limit(columns)) if word else ""
        return f"{text}\n" if self._column else text

    def _place(self, token: str, limit: int) -> str:
        """The text to write for a finished token: a line break, a word with its gap, or "" for spaces, which wait. limit: columns of a
        line."""
        if token == "\n":
            self._column, self._gap = 0, ""
            return "\n"
        if token.isspace():
            self._gap += " " * TAB if token == "\t" else token
            return ""
        begin = self._begin(token, limit)
        *lines, last = chop_cells(token, limit - self._column) or [""]
        self._column = cell_len(last) if lines else self._column + cell_len(last)
        return begin + "".join(f"{line}\n" for line in lines) + last

    def _begin(self, word: str, limit: int) -> str:
        """The text to write before a word: the gap, or a line break if the line has no room for the word."""
        gap, self._gap = self._gap, ""
        width = cell_len(gap)
        if self._column + width + cell_len(word) <= limit:
            self._column += width
            return gap
        if self._column:
            self._column = 0
            return "\n"
        return ""

    def _make_room(self, limit: int) -> str:
        """The text to write for an unfinished word that no longer fits on its line: the line break before it, and its own full lines; else
        nothing."""
        width = cell_len(self._gap) + cell_len(self._word)
        if not self._word or self._column + width <= limit:
            return ""
        begin = self._begin(self._word, limit)
        *lines, self._word = chop_cells(self._word, limit)
        return begin + "".join(f"{line}\n" for line in lines)


def _limit(columns: int) -> int:
    return max(columns - 1, 2)
