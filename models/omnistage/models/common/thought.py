"""The thought of a model before its answer: separates the text up to the mark that ends the thought from the answer.

The chat template of a checkpoint decides whether the prompt ends with the opening mark or the model writes it. Line ends at the edges of a
thought and right after it are layout: they are left out, as templates leave them out of earlier answers.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from omnistage.engine.detokenizer import Detokenizer

OPENS, CLOSES = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Marks:
    """Ids of the tokens before (opens) and after (closes) a thought. is_open: every prompt ends inside a thought; false: an answer may
    begin with `opens`."""

    opens: int
    closes: int
    is_open: bool

    def answer_tokens(self, history: Sequence[int]) -> Sequence[int] | None:
        """The tokens of `history` after the thought; None: the thought has not ended there. Call it only for answers that begin in a
        thought."""
        return history[history.index(self.closes) + 1 :] if self.closes in history else None


class ThoughtLike(Protocol):
    """The thought of one answer, token by token."""

    @property
    def count(self) -> int:
        """Number of tokens of the thought so far."""

    def take(self, token_id: int) -> str | None:
        """Add a token. Returns the text of the thought that became final with it; empty: none did; None: the token belongs to the
        answer."""

    def finish(self) -> str:
        """End the thought; returns the rest of its text."""


class _Place(enum.Enum):
    """Where the next token is: before the thought, within it, among the line ends after it, or in the answer."""

    BEFORE = enum.auto()
    WITHIN = enum.auto()
    AFTER = enum.auto()
    OVER = enum.auto()


class Thought:
    """Implements `ThoughtLike` for a thought between marks. count: number of its tokens, with the marks and the line ends after it."""

    def __init__(self, marks: Marks, piece: Callable[[int], bytes], *, is_laid_out: bool = True) -> None:
        """piece: returns the bytes of an id. is_laid_out: whether line ends after the thought are layout and no part of the answer; false:
        for a constrained answer."""
        self._marks, self._piece, self._is_laid_out = marks, piece, is_laid_out
        self._detokenizer = Detokenizer(piece)
        self._place = _Place.WITHIN if marks.is_open else _Place.BEFORE
        self._line_ends, self._has_begun = "", False
        self.count = 0

    def take(self, token_id: int) -> str | None:
        """See ThoughtLike.take."""
        if self._place is _Place.OVER or not self._belongs(token_id):
            self._place = _Place.OVER
            return None
        self.count += 1
        if self._place is _Place.AFTER:
            return ""
        if token_id == self._marks.closes:
            self._place = _Place.AFTER
            return self.finish()
        if token_id == self._marks.opens and not self._has_begun:  # A model may repeat the mark of the prompt.
            self._place = _Place.WITHIN
            return ""
        return self._final(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """See ThoughtLike.finish; line ends are left out."""
        return self._final(self._detokenizer.finish())

    def _belongs(self, token_id: int) -> bool:
        """Whether this token, at the present place, belongs to the thought."""
        match self._place:
            case _Place.BEFORE:
                return token_id == self._marks.opens
            case _Place.AFTER:
                return self._is_laid_out and self._piece(token_id).strip(b"\n") == b"" != self._piece(token_id)
        return True

    def _final(self, text: str) -> str:
        """Add decoded text, and return the next final text of the thought. Line ends at the thought's beginning are dropped; later line
        ends wait until other text follows."""
        text = self._line_ends + text if self._has_begun else text.lstrip("\n")
        final = text.rstrip("\n")
        self._line_ends = text[len(final) :]
        self._has_begun |= bool(final)
        return final
