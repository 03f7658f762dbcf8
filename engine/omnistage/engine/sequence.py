"""The state of one request on its way through the engine."""

from __future__ import annotations

import hashlib
import math
import time
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter

import numpy as np
import torch
from numpy.typing import NDArray

from omnistage.engine.pages import PAGE_ROWS
from omnistage.engine.request import Given, SequenceEvent, SequenceRequest, Taps
from omnistage.engine.sampler import Draws
from omnistage.engine.types import Item

_FIRST = attrgetter("first")

MAX_UNREAD = 32
"""Number of events that an answer may be ahead of its reader."""


class Sequence:
    """The rows of one request: how many there are, how many can be computed now, and how many are computed.

    A row's slot is its number in the sequence: first the rows of the prompt, then one row for each item of the answer. The item of the
    first `known` rows is known; the first `ready` of them have everything they need; the first `computed` of these are in the cache. Only
    the engine's thread touches it."""

    __slots__ = (
        "_appended",
        "_appended_all",
        "_given",
        "_given_rows",
        "_keys",
        "_nameless",
        "_silent",
        "_taps",
        "asked_s",
        "begun",
        "cached",
        "computed",
        "draws",
        "found_taps",
        "idle_since_s",
        "items",
        "number",
        "pages",
        "passed",
        "queued_s",
        "ran",
        "request",
        "taps_out",
        "unread",
        "waited",
    )

    def __init__(self, request: SequenceRequest) -> None:
        self.request = request
        self.items: list[Item] = list(request.history)
        self.pages: list[int] = []
        self.computed = 0
        self.cached = 0
        """Rows that were found in the prefix cache at the first admission."""
        self.taps_out = request.taps_from
        """Slot of the first row whose taps are still to be put out; None: no taps are wanted."""
        self.found_taps: list[Taps] = []
        """Taps that were found with kept pages, to be put out before any computed taps."""
        self.number = 0
        """Order of arrival; the scheduler sets it."""
        self.passed = 0
        """How often a later request was admitted before this one."""
        self.ran = 0
        """Number of the last step in which it had rows; 0: it had none yet."""
        self.waited = 0
        """Number of steps since it last had a run, in which a later sequence of its client had one."""
        self.idle_since_s = math.inf
        """The time at which it became idle, in seconds of the scheduler's clock; infinite while it is not idle."""
        self.unread = 0  # number of events that the reader has not taken yet
        self.asked_s = time.monotonic()
        self.begun = False
        """Whether it was admitted before."""
        self.queued_s = 0.0
        """Seconds from the request to its first admission."""
        ids = request.prompt.text_ids if request.seen is None else request.seen
        self.draws = Draws(
            request.sampling, request.seed, request.logprobs, set(ids), top_logprobs=request.top_logprobs, tokenless=request.tokenless
        )
        for item in request.history:
            self.draws.note(item[0])
        if request.constraint is not None:
            self.draws.walk = request.constraint.begin()
        self._given = list(request.prompt.given)
        self._given_rows = request.prompt.ready_rows
        """Number of rows of the prompt that have everything they need."""
        self._nameless = next((entry.first for entry in self._given if not entry.digest), None)
        """The first row of the prompt whose vector has no digest."""
        self._appended: list[torch.Tensor] = []
        self._appended_all = False  # whether no more vectors come for the answer
        self._keys: list[bytes] = []  # of the full pages, see `page_keys`
        self._silent = True  # whether no event was put out yet
        self._taps: dict[int, list[torch.Tensor]] = {}  # by number of the page in the sequence

    # How many rows ----------------------------------------------------------------------------------------------------------------

    @property
    def known(self) -> int:
        """Rows whose item is known."""
        return len(self.request.prompt) + len(self.items)

    @property
    def ready(self) -> int:
        """Rows that have everything they need to be computed."""
        if self._given_rows < len(self.request.prompt):
            return self._given_rows
        if not self.request.appended or self._appended_all:
            return self.known
        return len(self.request.prompt) + min(len(self.items), len(self._appended))

    @property
    def left(self) -> int:
        """Rows that can be computed now."""
        return self.ready - self.computed

    @property
    def able(self) -> bool:
        """Whether the sequence could compute something after its admission. A prompt whose vectors are still coming may begin with the rows
        that have theirs; if it was admitted before and lost its pages, it waits for all vectors."""
        return self.ready == self.known or (0 < self.ready < len(self.request.prompt) and not self.begun)

    @property
    def reads(self) -> bool:
        """Whether some rows of its prompt whose vectors came after the request can be computed now."""
        return self.request.prompt.given_later and self.computed < min(self.ready, len(self.request.prompt))

    @property
    def parked(self) -> bool:
        """Whether its reader has so many unread events that it is not computed further."""
        return self.unread >= MAX_UNREAD

    @property
    def starved(self) -> bool:
        """Whether no row can be computed now, because the vector of the next row has not come yet."""
        return self.left == 0

    @property
    def idle(self) -> bool:
        return self.parked or self.starved

    @property
    def banned(self) -> frozenset[int]:
        """Ids that the next item must not begin with."""
        request = self.request
        may_end = not request.ignore_end and len(self.items) >= request.min_items
        may_end = may_end or (self.draws.walk is not None and self.draws.walk.must_end)
        return request.banned if may_end else request.banned | request.end_ids

    def introduce(self, event: SequenceEvent) -> SequenceEvent:
        """Returns the event; queue time and cached rows are added to the first event of a sequence."""
        if self._silent:
            self._silent = False
            return replace(event, queued_s=self.queued_s, cached_rows=self.cached)
        return event

    # The content of a row --------------------------------------------------------------------------------------------------------

    def give(self, entry: Given) -> None:
        """Add vectors of the next rows of the prompt."""
        if self._nameless is None and not entry.digest:
            self._nameless = entry.first
        self._given.append(entry)
        self._given_rows += len(entry.rows)

    def append(self, rows: torch.Tensor, end: bool) -> None:
        """Add the vectors of the next items of the answer. rows: [n, given_width]. end: no more vectors come; the last vector serves every
        further item."""
        self._appended.extend(rows)
        self._appended_all = end

    def items_of(self, start: int, count: int) -> NDArray[np.int64]:
        """Items of the rows from slot `start` on, int64 [count, codebooks]."""
        prompt = self.request.prompt.items
        if start + count <= len(prompt):
            return prompt[start : start + count]
        answer = self.items[max(start - len(prompt), 0) : start + count - len(prompt)]
        later = np.array(answer, np.int64)
        return later if start >= len(prompt) else np.concatenate([prompt[start:], later])

    def positions_of(self, start: int, count: int, axes: int) -> NDArray[np.int64]:
        """Positions of the rows from slot `start` on, int64 [axes, count]."""
        prompt = self.request.prompt
        slots = np.broadcast_to(np.arange(start, start + count, dtype=np.int64), (axes, count))
        if prompt.positions is None:
            return slots + np.where(slots < len(prompt), 0, prompt.delta)
        within = max(min(start + count, len(prompt)) - start, 0)
        return np.concatenate([prompt.positions[:, start : start + within], slots[:, within:] + prompt.delta], axis=1)

    def given_of(self, start: int, count: int) -> list[tuple[int, torch.Tensor]]:
        """The vectors that belong to the `count` rows from slot `start` on: pairs of a row, counted from `start`, and the vectors [n,
        given_width] of this row and the n - 1 rows after it."""
        parts = [_overlap(entry, start, count) for entry in self._given_among(start, count)]
        if self._appended:
            prompt = len(self.request.prompt)
            for slot in range(max(start, prompt), start + count):
                parts.append((slot - start, self._appended[min(slot - prompt, len(self._appended) - 1)][None]))
        return parts

    def _given_among(self, start: int, count: int) -> Iterator[Given]:
        """Yields the entries of `_given` that have vectors for some of the `count` rows from slot `start` on. A prompt that came page by
        page has one entry for each page, so this does not go through all entries."""
        if start >= len(self.request.prompt):
            return
        after = bisect_right(self._given, start, key=_FIRST)
        for at in range(max(after - 1, 0), len(self._given)):
            entry = self._given[at]
            if entry.first >= start + count:
                return
            if entry.first + len(entry.rows) > start:
                yield entry

    # Taps of full pages, until the pages are kept for others -----------------------------------------------------------------------

    def keep_taps(self, taps: Taps) -> None:
        """Keep taps of the next rows, all in one page, until the prefix cache keeps the page. Taps of the answer's rows are not kept."""
        if taps.first < len(self.request.prompt):
            self._taps.setdefault(taps.first // PAGE_ROWS, []).append(taps.rows)

    def taps_of_page(self, page: int) -> torch.Tensor | None:
        """The kept taps of a page, [PAGE_ROWS, tap_width]; None: some of its rows have no kept taps."""
        parts = self._taps.get(page, [])
        return torch.cat(parts) if sum(map(len, parts)) == PAGE_ROWS else None

    def forget_taps(self) -> None:
        self._taps.clear()

    # Keys of pages ----------------------------------------------------------------------------------------------------------------

    def page_keys(self, rows: int) -> list[bytes]:
        """A key for each full page among the first `rows` rows: a hash of everything that the page's bits depend on, including the pages
        before it. The list ends before the first page with a vector that has no digest."""
        count = min(rows, self._keyed_rows) // PAGE_ROWS
        while len(self._keys) < count:
            self._keys.append(self._key(len(self._keys)))
        return self._keys[:count]

    @property
    def _keyed_rows(self) -> int:
        """Number of rows, from the first row on, whose content is completely described by ids and digests."""
        if self._nameless is not None:
            return self._nameless
        return self._given_rows if self.request.appended else self.ready

    def _key(self, page: int) -> bytes:
        """The key of one full page: a hash of the key before it and of the content of its rows."""
        prompt, start = self.request.prompt, page * PAGE_ROWS
        digest = hashlib.sha256(self._keys[page - 1] if page else b"scope" + prompt.scope)
        digest.update(self.items_of(start, PAGE_ROWS).tobytes())
        if prompt.positions is not None or prompt.delta:
            digest.update(self.positions_of(start, PAGE_ROWS, 1 if prompt.positions is None else len(prompt.positions)).tobytes())
        for entry in self._given_among(start, PAGE_ROWS):
            digest.update(f"given at {entry.first - start} of {len(entry.digest)} bytes ".encode() + entry.digest)
        return digest.digest()


def _overlap(entry: Given, start: int, count: int) -> tuple[int, torch.Tensor]:
    """The part of `entry` for the `count` rows from slot `start` on: its first row, counted from `start`, and its vectors."""
    first, last = max(entry.first, start), min(entry.first + len(entry.rows), start + count)
    return first - start, entry.rows[first - entry.first : last - entry.first]
