"""Collects the beginning of a speech as it comes: the rows of the conversation, and the first row of the answer."""

from __future__ import annotations

import hashlib
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from omnistage.engine.memory import PAGE_ROWS
from omnistage.models.common.arrays import array_of, tensor_of
from omnistage.models.common.speech.ports import HIDDEN, PLACES, PROMPT
from omnistage.models.interface import Array, BadRequest, Piece

Page = tuple[torch.Tensor, bytes]
"""Rows [n, row_size] and a digest of their bits."""


class Opening:
    """The beginning of one speech. Call `take` with each piece until it is `complete`; meanwhile its rows can be read page by page. places:
    places of the conversation's rows, int64 [axes, rows]; empty until all have come. reply: rows of the answer that have come. ended:
    whether no more rows of the answer come. `_missing`: ports whose end has not come."""

    def __init__(self, axes: int, between: torch.Tensor, context: int) -> None:
        """axes: how many numbers a place has. between: rows [n, row_size] between the conversation and the answer. context: largest number
        of rows of a conversation and frames of its speech together."""
        self._between, self._context = between, context
        self._missing = {PROMPT, PLACES}
        # Counted as they come, because rows may come one by one, and adding up all lengths each time would delay all sessions.
        self._count = dict.fromkeys((PROMPT, PLACES, HIDDEN), 0)
        self._read = 0  # number of rows that `read` has returned
        self._unread: list[torch.Tensor] = []  # rows of the conversation that `read` has not returned
        self._parts: list[torch.Tensor] = []  # places that have come
        self.places: NDArray[np.int64] = np.zeros((axes, 0), np.int64)
        self.reply: list[torch.Tensor] = []
        self.ended = False

    @property
    def complete(self) -> bool:
        return not self._missing and bool(self.reply or self.ended)

    @property
    def readable(self) -> bool:
        """Whether `read` would return rows now: a whole page, or the last rows."""
        return PLACES not in self._missing and (self._has_all or self._count[PROMPT] - self._read >= PAGE_ROWS)

    @property
    def _has_all(self) -> bool:
        """Whether all rows are there, including the first row of the answer."""
        return not self._missing and bool(self.reply)

    def take(self, piece: Piece) -> None:
        """Add a piece. Raises BadRequest for a conversation that is too long, and for rows and places whose numbers differ."""
        rows = tensor_of(cast(Array, piece.content))
        if piece.port == HIDDEN:
            # Further rows of the answer are dropped, because a Thinker may have a longer context than its Talker, which could not speak
            # them.
            rows = rows[: self._context - self._count[HIDDEN]]
        if len(rows):
            {PROMPT: self._unread, PLACES: self._parts, HIDDEN: self.reply}[piece.port].append(rows)
            self._count[piece.port] += len(rows)
        if piece.last:
            self._missing.discard(piece.port)
            self.ended = self.ended or piece.port == HIDDEN
            if piece.port == PLACES and self._parts:
                self.places = torch.cat(self._parts).to(torch.int64).T.numpy()
        self._check()

    def _check(self) -> None:
        """Raises BadRequest, see `take`."""
        count, placed = self._count[PROMPT], self._count[PLACES]
        # One row less, to leave room for the first row of the answer, with which the codes begin.
        max_rows = self._context - len(self._between) - 1
        if max(count, placed) > max_rows:
            raise BadRequest("thinker.messages", f"shorten the conversation: the Talker takes {max_rows} rows")
        if count != placed and PLACES not in self._missing and (not self._missing or count > placed):
            raise BadRequest("talker", f"a conversation of {count} rows has {placed} places: give each row one")

    def read(self) -> list[Page]:
        """Rows of the sequence that were not read before, as pages with digests, by which the prefix cache finds them when the conversation
        goes on later. Before the first row of the answer has come, only whole pages are read. Call it on a thread that may compute."""
        rows = torch.cat([*self._unread, self._between, self.reply[0][:1]] if self._has_all else self._unread)
        count = len(rows) if self._has_all else len(rows) // PAGE_ROWS * PAGE_ROWS
        # Cloned, because the rest may be few rows, and a view of them would keep all rows in memory.
        self._unread = [rows[count:].clone()]
        self._read += count
        return [_with_digest(rows[first : min(first + PAGE_ROWS, count)]) for first in range(0, count, PAGE_ROWS)]


def _with_digest(page: torch.Tensor) -> Page:
    """A page of rows with the digest of their bits."""
    return page, hashlib.sha256(array_of(page).data).digest()
