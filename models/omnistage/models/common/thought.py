"""What a model thinks before it answers: the text up to the mark that ends it, which is told apart from the answer.

Where the mark that begins it stands, in the prompt or in what the model says, the chat template of a checkpoint decides. Line ends at the
edges of a thought and right behind it are the layout of templates, and are left out, as templates do it with earlier answers.
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
    """Ids of the tokens around a thought. is_open: every prompt ends within one; else an answer may begin with one."""

    opens: int
    closes: int
    is_open: bool

    def answered(self, history: Sequence[int]) -> Sequence[int] | None:
        """The tokens behind a thought with which every answer begins; None where it has not ended with these."""
        return history[history.index(self.closes) + 1 :] if self.closes in history else None


class ThoughtLike(Protocol):
    """The thought of one answer, token by token."""

    @property
    def count(self) -> int:
        """Its tokens so far."""

    def take(self, token_id: int) -> str | None:
        """The next token; the text of the thought that became final with it, often empty. None: the token is of the answer."""

    def finish(self) -> str:
        """It ends here: what was held back of it."""


class _Place(enum.Enum):
    """Where the next token stands."""

    BEFORE = enum.auto()
    WITHIN = enum.auto()
    BEHIND = enum.auto()
    OVER = enum.auto()


class Thought:
    """Implements `ThoughtLike`: between marks. count: with its marks and the line ends behind it."""

    def __init__(self, marks: Marks, piece: Callable[[int], bytes], *, is_laid_out: bool = True) -> None:
        """piece: the bytes of an id. is_laid_out: line ends behind it are no part of the answer; not so where that is kept to something."""
        self._marks, self._piece, self._is_laid_out = marks, piece, is_laid_out
        self._detokenizer = Detokenizer(piece)
        self._place = _Place.WITHIN if marks.is_open else _Place.BEFORE
        self._line_ends, self._has_begun = "", False
        self.count = 0

    def take(self, token_id: int) -> str | None:
        """See ThoughtLike.take."""
        if self._place is _Place.OVER or not self._is_of_it(token_id):
            self._place = _Place.OVER
            return None
        self.count += 1
        if self._place is _Place.BEHIND:
            return ""
        if token_id == self._marks.closes:
            self._place = _Place.BEHIND
            return self.finish()
        if token_id == self._marks.opens and not self._has_begun:  # A model may say again what the prompt has said.
            self._place = _Place.WITHIN
            return ""
        return self._final(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """See ThoughtLike.finish; line ends are left out."""
        return self._final(self._detokenizer.finish())

    def _is_of_it(self, token_id: int) -> bool:
        match self._place:
            case _Place.BEFORE:
                return token_id == self._marks.opens
            case _Place.BEHIND:
                return self._is_laid_out and self._piece(token_id).strip(b"\n") == b"" != self._piece(token_id)
        return True

    def _final(self, text: str) -> str:
        text = self._line_ends + text if self._has_begun else text.lstrip("\n")
        final = text.rstrip("\n")
        self._line_ends = text[len(final) :]
        self._has_begun |= bool(final)
        return final
