"""Types of the engine's interface: a request, its results, and its possible errors. A request may have a constraint on the text of its
answer, which says before each token which tokens are allowed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from omnistage.engine.types import FinishReason, Item, Sampling, Unfit


class Walk(Protocol):
    """The state of a constraint within one answer: the tokens so far decide which may come next. One thread at a time uses it."""

    @property
    def complete(self) -> bool:
        """Whether it is known already that only an end may follow. False may also mean: not known yet. Reading it costs nothing."""

    @property
    def must_end(self) -> bool:
        """Whether only an end may come next. To find out, this may call `allowed`, which takes time."""

    def allowed(self) -> torch.Tensor:
        """The tokens that may come next, with the end tokens if the answer may end: int32 [ceil(vocabulary / 32)] on the CPU, one bit for
        each token, the lowest bit first. If no bit is set, the answer cannot go on. Neither the caller nor this object changes it later."""

    def note(self, token_id: int) -> None:
        """Add the next token of the answer, which is no end token."""


class Constraint(Protocol):
    """The constraint of one request's text."""

    @property
    def vocabulary(self) -> int:
        """Number of its tokens, which is the size of the decoder's vocabulary."""

    def begin(self) -> Walk:
        """A new walk for an answer, which begins after the request's history."""


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """Vectors for consecutive rows of a prompt, such as the features of a picture.

    first: slot of the first of these rows. rows: the vectors, [n, given_width]. digest: hash of everything that the vectors were made from
    (content, settings, encoder); empty: unknown, so the prefix cache keeps no pages from this row on."""

    first: int
    rows: torch.Tensor
    digest: bytes = b""


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """The rows with which a sequence begins.

    items: int64 [rows, codebooks]. given: vectors for some of the rows, in order, not overlapping. positions: int64 [axes, rows]; None: a
    row's position is its slot, on every axis. delta: a row after the prompt has the position slot + delta, on every axis. scope: prompts of
    different scopes share no pages. given_later: each row after the last row of `given` needs a vector too, which comes by
    `SequenceStream.give`; rows that have their vector are computed meanwhile."""

    items: NDArray[np.int64]
    given: tuple[Given, ...] = ()
    positions: NDArray[np.int64] | None = None
    delta: int = 0
    scope: bytes = b""
    given_later: bool = False

    def __post_init__(self) -> None:
        rows = len(self.items)
        if not rows:
            raise ValueError("the prompt has no row")
        if self.items.ndim != 2 or self.items.dtype != np.int64:
            raise ValueError(f"the items of a prompt are int64 [rows, codebooks], not {self.items.dtype} {list(self.items.shape)}")
        reached = 0
        for entry in self.given:
            if entry.first < reached or not len(entry.rows) or entry.first + len(entry.rows) > rows:
                raise ValueError(f"given rows at {entry.first} overlap others, are none, or reach beyond the {rows} rows of the prompt")
            reached = entry.first + len(entry.rows)
        if self.positions is not None and self.positions.shape[1:] != (rows,):
            raise ValueError(f"positions are [axes, {rows}], not {list(self.positions.shape)}")

    @classmethod
    def of_tokens(cls, token_ids: Iterable[int], scope: bytes = b"") -> Prompt:
        """A prompt of text alone."""
        return cls(np.fromiter(token_ids, np.int64)[:, None], scope=scope)

    def __len__(self) -> int:
        return len(self.items)

    @property
    def given_rows(self) -> int:
        """Number of rows up to the last one for which a vector is given."""
        return self.given[-1].first + len(self.given[-1].rows) if self.given else 0

    @property
    def ready_rows(self) -> int:
        """Number of rows that can be computed before a vector comes by `SequenceStream.give`."""
        return self.given_rows if self.given_later else len(self.items)

    @property
    def text_ids(self) -> frozenset[int]:
        """Ids of the rows without a given vector."""
        is_text = np.ones(len(self.items), bool)
        for entry in self.given:
            is_text[entry.first : entry.first + len(entry.rows)] = False
        is_text[self.ready_rows :] = False
        return frozenset(self.items[is_text, 0].tolist())


@dataclass(frozen=True, slots=True, eq=False)
class SequenceRequest:
    """A request to draw items after a prompt.

    max_items: items that the whole answer may have, `history` included; at least one more than the history has. min_items: no end is drawn
    before the answer has this many items. end_ids: an item that begins with one of these ends the answer and is no part of it. ignore_end:
    no end is ever drawn. banned: ids that are never drawn. logprobs: whether the logprob of each item is wanted. top_logprobs: with
    `logprobs`, for how many of the likeliest tokens logprobs are wanted too. tokenless: ids of the head that are not tokens, and so never
    among the likeliest. history: the beginning of the answer, made earlier by an equal request; its rows are computed again, with the same
    bits, and the answer goes on after it. seen_ids: ids that the repetition penalty counts as seen before the answer; None: the text of the
    prompt. constraint: limits the text; if it allows nothing more, the answer ends, even against min_items and ignore_end.

    appended: whether the row of each item of the answer also needs a vector, which comes by `SequenceStream.append`: the n-th vector for
    the n-th item, and the last vector for every further item. taps_from: taps are wanted for the rows from this slot on; None: for no row.
    client: sequences of different clients take turns."""

    prompt: Prompt
    seed: int
    max_items: int
    sampling: Sampling = field(default_factory=Sampling)
    min_items: int = 0
    end_ids: frozenset[int] = frozenset()
    ignore_end: bool = False
    banned: frozenset[int] = frozenset()
    logprobs: bool = False
    top_logprobs: int = 0
    tokenless: frozenset[int] = frozenset()
    history: tuple[Item, ...] = ()
    seen_ids: frozenset[int] | None = None
    constraint: Constraint | None = None
    appended: bool = False
    taps_from: int | None = None
    client: str = ""

    def __post_init__(self) -> None:
        if self.max_items <= len(self.history):
            raise Unfit("history", f"the answer ended before or with these {len(self.history)} items: it has {self.max_items} at most")

    @property
    def rows(self) -> int:
        """Largest number of rows that prompt and answer can have together. The row of the answer's last item is not counted: it is never
        computed."""
        return len(self.prompt) + self.max_items - 1


@dataclass(frozen=True, slots=True, eq=False)
class Taps:
    """The taps of consecutive rows; a tap is a vector that the decoder puts out for a row, for the next stage. first: slot of the first
    row. rows: [n, tap_width] in the decoder's dtype, on the CPU, in memory that nothing changes later."""

    first: int
    rows: torch.Tensor

    def beginning_at(self, slot: int) -> Taps:
        """These taps without the taps of rows before `slot`."""
        skipped = max(slot - self.first, 0)
        return Taps(self.first + skipped, self.rows[skipped:]) if skipped else self


@dataclass(frozen=True, slots=True, eq=False)
class SequenceEvent:
    """One event of a sequence.

    item: the drawn item; None if an end was drawn, or if the event has only taps. logprob: of the item; None: not wanted. top: the tokens
    that were likeliest instead of the item, as (id, logprob), descending. finish_reason: None except on the last event. taps: of computed
    rows; the taps of an item's row come after the item. complete: the constraint allows nothing after the item. queued_s, cached_rows: on
    the first event, seconds from the request to its admission, and rows of the prompt that were found in the prefix cache."""

    item: Item | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    finish_reason: FinishReason | None = None
    taps: Taps | None = None
    complete: bool = False
    queued_s: float = 0.0
    cached_rows: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """How busy an engine is.

    Numbers of sequences: waiting for admission; preempted ones among the waiting; running; parked because nobody reads them; starved
    because the vector of their next row has not come. Numbers of pages: held by sequences (`pages_used`), kept only for later prompts
    (`pages_kept`), all. Counts since the start: steps, sequences in them (each once a step), computed rows, drawn items, preemptions."""

    waiting: int = 0
    preempted: int = 0
    running: int = 0
    parked: int = 0
    starved: int = 0
    pages_used: int = 0
    pages_kept: int = 0
    pages_total: int = 0
    steps: int = 0
    stepped: int = 0
    rows: int = 0
    items: int = 0
    preemptions: int = 0


class EngineFull(RuntimeError):
    """The waiting queue is full: ask again later or elsewhere."""


class EngineClosed(RuntimeError):
    """The engine was closed, or its thread ended by a bug (then the cause is attached)."""


class SequenceFailed(RuntimeError):
    """This sequence could not go on: its step raised (the cause is attached) or its logits were not finite. Other sequences go on."""


class DeadEnd(SequenceFailed):
    """The constraint of this sequence allows neither a token nor an end after its text. Other sequences go on."""
