"""Makes the pieces of a Thinker's answer for its ports, out of the tokens and rows that an engine makes. It needs no torch and no thread.

Text is final when no stop string can cut it any more; only final text goes out. A row goes out together with the text of its token, so that
a Talker, which speaks the rows, says what the client reads. Text that a stop string has cut off gets no rows.

The text up to the mark that ends a thought is the thought of the model, before its answer. The chat template of a checkpoint decides
whether the prompt ends with the opening mark or the model writes it. Line ends at the edges of a thought and right after it are layout:
they are left out, as templates leave them out of earlier answers.
"""

from __future__ import annotations

import enum
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from omnistage.engine.detokenizer import Detokenizer
from omnistage.engine.types import FinishReason
from omnistage.models.interface import Array, TensorRows, TextPiece, TokenLogprob, Wanted
from omnistage.models.requests import check_place
from omnistage.models.text.repetition import Repetition

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
                piece = self._piece(token_id)
                return self._is_laid_out and piece != b"" and piece.strip(b"\n") == b""
        return True

    def _final(self, text: str) -> str:
        """Add decoded text, and return the next final text of the thought. Line ends at the thought's beginning are dropped; later line
        ends wait until other text follows."""
        text = self._line_ends + text if self._has_begun else text.lstrip("\n")
        final = text.rstrip("\n")
        self._line_ends = text[len(final) :]
        self._has_begun |= bool(final)
        return final


class _Span(NamedTuple):
    """The place of a token's text in the text of all tokens, in characters."""

    begin: int
    end: int


class AnswerAssembler:
    """Makes the pieces of one answer. Call `take` after every step until the answer is `complete`."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        ports: Wanted,
        *,
        history: Sequence[int] = (),
        finished: FinishReason | None = None,
        max_tokens: int = sys.maxsize,
        row_port: str = "",
        last_row: bool = True,
        row_of: Callable[[int], Array] | None = None,
        prompt_port: str = "",
        prompt_rows: int = 0,
        prompt_slots: NDArray[np.int64] | None = None,
        ready: Sequence[TensorRows] = (),
        thought: ThoughtLike | None = None,
        repetition: Repetition | None = None,
    ) -> None:
        """history: tokens of the answer that went out earlier. finished: why the answer ended after these tokens; None: it goes on.
        max_tokens: largest number of tokens of the answer. row_port: the port with one row for each token; empty: the model has no such
        port. last_row: whether the last token has a row although no end token follows it, because there was no room for one or a stop
        string was met. row_of: makes the row of a token, [1, width], from its id; None: the engine makes the rows. prompt_port: the port
        with the rows of the prompt. prompt_rows: number of rows of the prompt. prompt_slots: int64, ascending: the slots whose rows this
        port has; None: all. ready: rows that are ready already, and go out first. thought: the thought before the answer, which has no
        rows; None: there is none. repetition: new; the answer ends when it is endless; None: however it repeats itself, it goes on. Raises
        BadRequest if the first wanted row lies after the rows of the prompt, or after the tokens so far."""
        self._detokenizer = detokenizer
        self._wants_text = "text" in ports
        self._wants_rows = row_port in ports
        self._row_port, self._last_row, self._row_of = row_port, last_row, row_of
        self._first_row = self._next_row = ports.get(row_port, 0)
        self._spans: deque[_Span] = deque()  # of the tokens with wanted rows whose text is not final yet
        self._count = 0  # number of tokens so far, the thought included
        self._thought, self._repetition = thought, repetition
        self._thought_text: str | None = None
        """Text of the thought since the last piece; None: the tokens since then are not part of the thought."""
        self._finished_pieces: list[TextPiece] = []
        """The last piece of a thought that has ended; it waits for the next `take`."""
        self._rows_due = 0
        """Number of tokens whose text is final and whose row has not gone out yet."""
        self._rows: deque[Array] = deque()  # rows that have come and not gone out
        self._arrived = 0
        """Number of rows that have come and not gone out."""
        self._rows_ended = not self._wants_rows
        self._max_tokens = max_tokens
        self._prompt_port, self._prompt_rows = prompt_port, prompt_rows
        self._prompt_slots = np.arange(prompt_rows) if prompt_slots is None else prompt_slots
        self._next_prompt_row = ports.get(prompt_port, len(self._prompt_slots))
        self._ready = list(ready)
        self._prompt_pieces: list[TensorRows] = []
        if prompt_port in ports and self._next_prompt_row == len(self._prompt_slots):
            self._prompt_pieces.append(TensorRows(prompt_port, np.empty((0, 0), np.float32), last=True))
        self._text = ""
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._pieces: list[bytes] = []
        self._top_logprobs: list[tuple[TokenLogprob, ...]] = []
        self._reason: FinishReason | None = None
        self._reason_is_out = False
        """Whether the reason of the end has gone out."""
        self._queued_s, self._cached_tokens = 0.0, 0
        self._prompt_tokens = prompt_rows or None
        check_place(ports, prompt_port, len(self._prompt_slots), "rows of the prompt")
        for token_id in history:
            self._push(token_id)
        self._thought_text = None  # The text of a history went out earlier.
        check_place(ports, row_port, self._count - self._thought_tokens, "tokens so far")
        if finished is not None:
            self._detokenizer.finish()
            self._reason, self._reason_is_out = finished, True
        elif self._detokenizer.stopped:
            self._reason = FinishReason.STOP
        elif self._is_endless:
            self.end(FinishReason.REPETITION)

    @property
    def ended(self) -> bool:
        """Whether the text is complete, so that further tokens are dropped."""
        return self._reason is not None

    @property
    def complete(self) -> bool:
        """Whether all wanted output has come, except the pieces that `take` still has."""
        self._settle()
        has_prompt = self._next_prompt_row >= len(self._prompt_slots)
        has_rows = self._rows_ended or (self.ended and self._arrived >= self._rows_due)
        return has_prompt and has_rows and (self.ended or not self._wants_text)

    @property
    def items(self) -> int:
        """Number of items to request from an engine, history included: only as many as the wanted ports need. An engine makes the row of a
        token only to draw the next token, so a wanted row of the last token takes one item more."""
        if self.ended or not (self._wants_text or self._wants_rows):
            return self._count + 1
        return self._max_tokens + int(self._wants_rows and self._last_row)

    @property
    def first_slot(self) -> int | None:
        """The first slot whose row is wanted, counted from the start of the prompt; None: no rows are wanted."""
        if self._next_prompt_row < len(self._prompt_slots):
            return int(self._prompt_slots[self._next_prompt_row])
        if not self._wants_rows or self._row_of is not None:
            return None
        return self._prompt_rows + self._thought_tokens + self._first_row

    def begin(self, queued_s: float, cached_tokens: int = 0) -> None:
        """Set two figures of the next piece: seconds from the request to its admission, and number of tokens found in the cache."""
        self._queued_s, self._cached_tokens = queued_s, cached_tokens

    def asked_with(self, prompt_tokens: int) -> None:
        """Set the number of tokens of the prompt, for the next piece."""
        self._prompt_tokens = prompt_tokens

    def token(self, token_id: int, logprob: float | None = None, *, top: Sequence[tuple[int, float]] = (), complete: bool = False) -> None:
        """Add the next token. Tokens after a stop string are dropped. top: the tokens that were likeliest there, as (id, logprob).
        complete: the text is complete with this token."""
        if self.ended:
            return
        text = self._push(token_id)
        self._ids.append(token_id)
        if logprob is not None:
            self._logprobs.append(logprob)
            self._pieces.append(self._detokenizer.piece(token_id))
        if top:
            self._top_logprobs.append(tuple(TokenLogprob(top_id, value, self._detokenizer.piece(top_id)) for top_id, value in top))
        self._text += text
        if self._detokenizer.stopped:
            self._reason = FinishReason.STOP
        elif complete:
            self.end(FinishReason.STOP)
        elif self._is_endless:
            self.end(FinishReason.REPETITION)
        elif self._count >= self._max_tokens:
            self.end(FinishReason.LENGTH)

    def rows_at(self, slot: int, rows: Array) -> None:
        """Add the rows [n, width] of consecutive slots; unwanted rows are dropped. slot: of the first row, counted from the prompt's
        start."""
        split = max(self._prompt_rows - slot, 0)
        prompt_part, answer_part = rows[:split], rows[split:]
        end = int(np.searchsorted(self._prompt_slots, slot + len(prompt_part)))
        indices = self._prompt_slots[self._next_prompt_row : end] - slot  # of the rows to send, in `rows`
        if len(indices):
            self._next_prompt_row = end
            run = slice(int(indices[0]), int(indices[-1]) + 1)
            # Consecutive rows need no copy.
            prompt = rows[run] if run.stop - run.start == len(indices) else rows[indices]
            self._prompt_pieces.append(TensorRows(self._prompt_port, prompt, last=end >= len(self._prompt_slots)))
        if self._row_of is None:
            first = max(slot - self._prompt_rows, 0)  # index of the first row of `answer_part` among the rows of all tokens
            # A row comes after its token, so the number of the thought's rows is final here.
            needless = max(self._thought_tokens + self._next_row - first, 0)
            self.rows(answer_part[needless:])

    def rows(self, rows: Array) -> None:
        """Add the next rows of the answer [n, width], from the first wanted row on. They are not copied, and may come later than their
        tokens."""
        if self._wants_rows and len(rows):
            self._rows.append(rows)
            self._arrived += len(rows)
            self._next_row += len(rows)

    def end(self, reason: FinishReason) -> None:
        """Note that no more tokens come, for this reason; rows may still come."""
        if self.ended:
            return
        if self._thought is not None and (rest := self._thought.finish()):
            self._thought_text = (self._thought_text or "") + rest
        self._text += self._detokenizer.finish()
        self._reason = FinishReason.STOP if self._detokenizer.stopped else reason

    def take(self) -> list[TextPiece | TensorRows]:
        """The pieces that became final since the last call: rows of the prompt, then text, then the rows of this text. Text comes before
        its rows, so that no reader of the rows is ahead of the reader of the text."""
        pieces: list[TextPiece | TensorRows] = [*self._ready, *self._joined_prompt()]
        self._ready = []
        ends = self.ended and not self._reason_is_out
        if self._wants_text:
            pieces += self._finished_pieces
            if self._ids or self._text or ends:
                pieces.append(self._piece(self._reason if ends else None))
                self._reason_is_out = self._reason_is_out or ends
        self._finished_pieces = []
        if not self._rows_ended:
            pieces += self._final_rows()
        return pieces

    def _piece(self, reason: FinishReason | None = None) -> TextPiece:
        """Make a piece of the tokens and text since the last piece. reason: why the answer ended; None: it goes on."""
        figures = (self._queued_s, self._cached_tokens, self._prompt_tokens)
        tokens = (tuple(self._ids), tuple(self._logprobs), tuple(self._top_logprobs))
        piece = TextPiece(self._text, *tokens, reason, *figures, pieces=tuple(self._pieces), thought=self._thought_text)
        self._text, self._ids, self._logprobs, self._pieces, self._top_logprobs = "", [], [], [], []
        self._queued_s, self._cached_tokens, self._prompt_tokens = 0.0, 0, None
        self._thought_text = None
        return piece

    @property
    def _is_endless(self) -> bool:
        """Whether the answer repeats itself without end, and may end for that."""
        return self._repetition is not None and self._repetition.is_endless

    @property
    def _thought_tokens(self) -> int:
        """Number of tokens in the thought."""
        return 0 if self._thought is None else self._thought.count

    def _joined_prompt(self) -> list[TensorRows]:
        """The new rows of the prompt, joined to one piece or none, because many small pieces, one for each page, would cost more."""
        pieces, self._prompt_pieces = self._prompt_pieces, []
        if len(pieces) < 2:
            return pieces
        return [TensorRows(self._prompt_port, np.concatenate([piece.rows for piece in pieces]), last=pieces[-1].last)]

    def _push(self, token_id: int) -> str:
        """Add a token. Returns the text of the answer that became final with it. Text of a thought is added to `_thought_text` instead, and
        empty text is returned."""
        if self._repetition is not None:
            self._repetition.add(token_id)
        if self._thought is not None and (thought := self._thought.take(token_id)) is not None:
            self._thought_text = (self._thought_text or "") + thought
            self._count += 1
            return ""
        if self._thought_text is not None and self._ids:
            self._finished_pieces.append(self._piece())
        begin = self._detokenizer.decoded
        text = self._detokenizer.push(token_id)
        if self._wants_rows and self._count - self._thought_tokens >= self._first_row:
            self._spans.append(_Span(begin, self._detokenizer.needed_characters))
            if self._row_of is not None:
                self.rows(self._row_of(token_id))
        self._count += 1
        return text

    def _settle(self) -> None:
        """Add the number of tokens whose text has become final to `_rows_due`, and drop their spans. A last token without a row is left."""
        # An engine makes the last token's row only if it draws one more token, the end token.
        has_last_row = self._end_was_drawn if self._row_of is None else self._count < self._max_tokens
        rowless_tokens = 0 if has_last_row or self._last_row else 1
        while len(self._spans) > rowless_tokens and self._is_final(self._spans[0]):
            self._spans.popleft()
            self._rows_due += 1

    @property
    def _end_was_drawn(self) -> bool:
        """Whether an end token ended the answer. It uses only facts that a replica also has if it continues the answer."""
        return self._reason is FinishReason.STOP and not self._detokenizer.stopped and self._count < self._max_tokens

    def _is_final(self, span: _Span) -> bool:
        """Whether the text of a token is final. A token that a stop string cuts in the middle counts as final and is spoken whole, because
        otherwise its visible part would not be heard."""
        final_end = self._detokenizer.given_characters
        if span.end <= final_end:
            return True
        return self.ended and (span.begin < final_end or not self._detokenizer.stopped)

    def _final_rows(self) -> list[TensorRows]:
        """The rows of tokens whose text is final, in one piece or none. A piece without rows means the end of the port."""
        self._settle()
        remaining = count = min(self._rows_due, self._arrived)
        parts: list[Array] = []
        while remaining:
            rows = self._rows.popleft()
            if len(rows) > remaining:
                self._rows.appendleft(rows[remaining:])
                rows = rows[:remaining]
            parts.append(rows)
            remaining -= len(rows)
        self._rows_due -= count
        self._arrived -= count
        self._rows_ended = self.ended and not self._rows_due
        if not parts:
            return [TensorRows(self._row_port, np.empty((0, 0), np.float32), last=True)] if self._rows_ended else []
        return [TensorRows(self._row_port, np.concatenate(parts) if len(parts) > 1 else parts[0], last=self._rows_ended)]


# The loop ------------------------------------------------------------------------------------------------------------------------------

T = TypeVar("T", covariant=True)


class SlotRows(Protocol[T]):
    """Rows of consecutive slots from an engine. first: slot of the first row."""

    @property
    def first(self) -> int: ...

    @property
    def rows(self) -> T: ...


class EngineEvent(Protocol[T]):
    """One output of an engine; see omnistage.engine.request."""

    @property
    def item(self) -> Sequence[int] | None: ...

    @property
    def logprob(self) -> float | None: ...

    @property
    def top(self) -> Sequence[tuple[int, float]]: ...

    @property
    def finish_reason(self) -> FinishReason | None: ...

    @property
    def taps(self) -> SlotRows[T] | None: ...

    @property
    def complete(self) -> bool: ...

    @property
    def queued_s(self) -> float: ...

    @property
    def cached_rows(self) -> int: ...


class EngineStream(Protocol[T]):
    """The outputs of an engine for one request. `take` waits for events; after the end it returns an empty list."""

    async def take(self) -> Sequence[EngineEvent[T]]: ...


async def answer_pieces(
    stream: EngineStream[T], answer: AnswerAssembler, array: Callable[[T], Array]
) -> AsyncGenerator[TextPiece | TensorRows, None]:
    """Yields the pieces of an answer, whose tokens are the first ids of a stream's items. array: converts the engine's rows to an array for
    the port. It ends when all wanted output has come, perhaps before the stream ends, which the caller then closes."""
    while True:
        for piece in answer.take():
            yield piece
        if answer.complete:
            return
        events = await stream.take()
        if not events:
            raise RuntimeError("the engine has ended before all rows were there")
        for event in events:
            if event.queued_s or event.cached_rows:
                answer.begin(event.queued_s, event.cached_rows)
            if event.taps is not None:
                answer.rows_at(event.taps.first, array(event.taps.rows))
            if event.item is not None:
                answer.token(event.item[0], event.logprob, top=event.top, complete=event.complete)
            if event.finish_reason is not None:
                answer.end(event.finish_reason)
