"""One request on its way through the engine: its state, which only the engine's thread touches, the stream of its answer, as its reader
sees it, and the mailbox in which readers leave orders for the engine's thread."""

from __future__ import annotations

import asyncio
import hashlib
import math
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from operator import attrgetter

import numpy as np
import torch
from numpy.typing import NDArray

from omnistage.engine.memory import PAGE_ROWS
from omnistage.engine.request import EngineClosed, EngineFull, Given, SequenceEvent, SequenceFailed, SequenceRequest, Taps
from omnistage.engine.sampler import Draws
from omnistage.engine.types import Item

_FIRST = attrgetter("first")

MAX_UNREAD = 32
"""Number of events that an answer may be ahead of its reader."""


class Sequence:
    """The rows of one request: how many there are, how many can be computed now, and how many are computed.

    A row's slot is its number in the sequence: first the rows of the prompt, then one row for each item of the answer. The item of the
    first `known_rows` rows is known; the first `ready` of them have everything they need; the first `computed` of these are in the cache.
    Only the engine's thread touches it."""

    __slots__ = (
        "_appended",
        "_appended_all",
        "_given_rows",
        "_keys",
        "_silent",
        "_taps",
        "_undigested_from",
        "_vectors",
        "asked_s",
        "cached",
        "computed",
        "draws",
        "found_taps",
        "has_begun",
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
        self.has_begun = False
        """Whether it was admitted before."""
        self.queued_s = 0.0
        """Seconds from the request to its first admission."""
        ids = request.prompt.text_ids if request.seen_ids is None else request.seen_ids
        self.draws = Draws(
            request.sampling, request.seed, request.logprobs, set(ids), top_logprobs=request.top_logprobs, tokenless=request.tokenless
        )
        for item in request.history:
            self.draws.note(item[0])
        if request.constraint is not None:
            self.draws.walk = request.constraint.begin()
        self._vectors = list(request.prompt.given)
        self._given_rows = request.prompt.ready_rows
        """Number of rows of the prompt that have everything they need."""
        self._undigested_from = next((entry.first for entry in self._vectors if not entry.digest), None)
        """The first row of the prompt whose vector has no digest."""
        self._appended: list[torch.Tensor] = []
        self._appended_all = False  # whether no more vectors come for the answer
        self._keys: list[bytes] = []  # of the full pages, see `page_keys`
        self._silent = True  # whether no event was put out yet
        self._taps: dict[int, list[torch.Tensor]] = {}  # by number of the page in the sequence

    # How many rows ----------------------------------------------------------------------------------------------------------------

    @property
    def known_rows(self) -> int:
        """Rows whose item is known."""
        return len(self.request.prompt) + len(self.items)

    @property
    def ready(self) -> int:
        """Rows that have everything they need to be computed."""
        if self._given_rows < len(self.request.prompt):
            return self._given_rows
        if not self.request.appended or self._appended_all:
            return self.known_rows
        return len(self.request.prompt) + min(len(self.items), len(self._appended))

    @property
    def rows_left(self) -> int:
        """Rows that can be computed now."""
        return self.ready - self.computed

    @property
    def able(self) -> bool:
        """Whether the sequence could compute something after its admission. A prompt whose vectors are still coming may begin with the rows
        that have theirs; if it was admitted before and lost its pages, it waits for all vectors."""
        return self.ready == self.known_rows or (0 < self.ready < len(self.request.prompt) and not self.has_begun)

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
        return self.rows_left == 0

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
        if self._undigested_from is None and not entry.digest:
            self._undigested_from = entry.first
        self._vectors.append(entry)
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
        answer = np.array(self.items[max(start - len(prompt), 0) : start + count - len(prompt)], np.int64)
        return answer if start >= len(prompt) else np.concatenate([prompt[start:], answer])

    def positions_of(self, start: int, count: int, axes: int) -> NDArray[np.int64]:
        """Positions of the rows from slot `start` on, int64 [axes, count]."""
        prompt = self.request.prompt
        slots = np.broadcast_to(np.arange(start, start + count, dtype=np.int64), (axes, count))
        if prompt.positions is None:
            return slots + np.where(slots < len(prompt), 0, prompt.delta)
        prompt_rows = max(min(start + count, len(prompt)) - start, 0)
        return np.concatenate([prompt.positions[:, start : start + prompt_rows], slots[:, prompt_rows:] + prompt.delta], axis=1)

    def given_of(self, start: int, count: int) -> list[tuple[int, torch.Tensor]]:
        """The vectors that belong to the `count` rows from slot `start` on: pairs of a row, counted from `start`, and the vectors [n,
        given_width] of this row and the n - 1 rows after it."""
        parts = [_overlap(entry, start, count) for entry in self._given_among(start, count)]
        if self._appended:
            prompt_rows = len(self.request.prompt)
            for slot in range(max(start, prompt_rows), start + count):
                # The last vector serves all further items.
                parts.append((slot - start, self._appended[min(slot - prompt_rows, len(self._appended) - 1)][None]))
        return parts

    def _given_among(self, start: int, count: int) -> Iterator[Given]:
        """Yields the entries of `_vectors` that have vectors for some of the `count` rows from slot `start` on. A prompt that came page by
        page has one entry for each page, so this does not go through all entries."""
        if start >= len(self.request.prompt):
            return
        # The last entry that begins at or before `start` may reach beyond it.
        next_entry = bisect_right(self._vectors, start, key=_FIRST)
        for index in range(max(next_entry - 1, 0), len(self._vectors)):
            entry = self._vectors[index]
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
        if self._undigested_from is not None:
            return self._undigested_from
        return self._given_rows if self.request.appended else self.ready

    def _key(self, page: int) -> bytes:
        """The key of one full page: a hash of the key before it and of the content of its rows."""
        prompt, start = self.request.prompt, page * PAGE_ROWS
        digest = hashlib.sha256(self._keys[page - 1] if page else b"scope" + prompt.scope)
        digest.update(self.items_of(start, PAGE_ROWS).tobytes())
        if prompt.positions is not None or prompt.delta:
            # Without positions of the prompt, a row has the same position on every axis, so one axis is enough.
            digest.update(self.positions_of(start, PAGE_ROWS, 1 if prompt.positions is None else len(prompt.positions)).tobytes())
        for entry in self._given_among(start, PAGE_ROWS):
            digest.update(f"given at {entry.first - start} of {len(entry.digest)} bytes ".encode() + entry.digest)
        return digest.digest()


def _overlap(entry: Given, start: int, count: int) -> tuple[int, torch.Tensor]:
    """The part of `entry` for the `count` rows from slot `start` on: its first row, counted from `start`, and its vectors."""
    first, last = max(entry.first, start), min(entry.first + len(entry.rows), start + count)
    return first - start, entry.rows[first - entry.first : last - entry.first]


End = SequenceFailed | EngineClosed


@dataclass(slots=True)
class Orders:
    """The orders to the engine's thread since it last collected them. requests: new ones. cancelled: requests to end. taken_counts: number
    of events that each reader took. prompt_vectors: vectors of the next rows of a prompt. appended: vectors of the next items of an answer,
    and whether they are the last. closing: the engine must end."""

    requests: list[SequenceStream] = field(default_factory=list)
    cancelled: list[SequenceStream] = field(default_factory=list)
    taken_counts: dict[SequenceStream, int] = field(default_factory=dict)
    prompt_vectors: list[tuple[SequenceStream, Given]] = field(default_factory=list)
    appended: list[tuple[SequenceStream, torch.Tensor, bool]] = field(default_factory=list)
    closing: bool = False

    def __bool__(self) -> bool:
        return bool(self.requests or self.cancelled or self.taken_counts or self.prompt_vectors or self.appended or self.closing)


class Mailbox:
    """Takes orders from any thread to the engine's thread. max_waiting: number of requests that may wait for admission. on_order: called
    when an order comes. on_rest: called before the engine's thread waits. Both are called under the lock and must not wait.

    Only the number of waiting requests is bounded here; the other orders are bounded by what one stream may order."""

    def __init__(self, max_waiting: int, on_order: Callable[[], None], on_rest: Callable[[], None]) -> None:
        self._changed = threading.Condition()
        self._orders = Orders()
        self._max_waiting, self._waiting = max_waiting, 0
        self._on_order, self._on_rest = on_order, on_rest
        self._closed = False

    def ask(self, stream: SequenceStream) -> None:
        """Order a new request. Raises EngineFull or EngineClosed."""
        with self._changed:
            if self._closed:
                raise EngineClosed("the engine is closed")
            if self._waiting >= self._max_waiting:
                raise EngineFull(f"{self._waiting} requests are waiting already")
            self._waiting += 1
            self._orders.requests.append(stream)
            self._wake()

    def cancel(self, stream: SequenceStream) -> None:
        with self._changed:
            self._orders.cancelled.append(stream)
            self._wake()

    def note_taken(self, stream: SequenceStream, count: int) -> None:
        with self._changed:
            self._orders.taken_counts[stream] = self._orders.taken_counts.get(stream, 0) + count
            self._wake()

    def give(self, stream: SequenceStream, entry: Given) -> None:
        with self._changed:
            self._orders.prompt_vectors.append((stream, entry))
            self._wake()

    def append(self, stream: SequenceStream, rows: torch.Tensor, end: bool) -> None:
        with self._changed:
            self._orders.appended.append((stream, rows, end))
            self._wake()

    def close(self) -> None:
        """Take no more requests."""
        with self._changed:
            self._closed = self._orders.closing = True
            self._wake()

    def left_queue(self, count: int) -> None:
        """Note that `count` requests no longer wait: they were admitted, or ended before that."""
        with self._changed:
            self._waiting -= count

    def collect(self, wait: bool, most_s: float | None = None) -> Orders:
        """Return and forget all orders. wait: if there is none, wait for one, at most `most_s` seconds (None: no limit), or return none."""
        with self._changed:
            while wait and not self._orders:
                self._on_rest()
                if not self._changed.wait(most_s):
                    self._on_order()  # The thread has work again, although no order came.
                    break
            orders, self._orders = self._orders, Orders(closing=self._closed)
        return orders

    def _wake(self) -> None:
        self._on_order()
        self._changed.notify()


class SequenceStream:
    """The answer to one request, for one reader on the event loop that submitted it. The reader closes it at the end, or earlier to cancel
    the request."""

    def __init__(self, sequence: Sequence, mailbox: Mailbox, given_width: int) -> None:
        self.sequence = sequence
        self.loop = asyncio.get_running_loop()
        self._mailbox = mailbox
        self._events: list[SequenceEvent] = []
        self._error: End | None = None
        self._is_ended = False  # whether no more events come
        self._changed = asyncio.Event()
        self._appendable, self._given_width = sequence.request.max_items, given_width
        self._appended_all = not sequence.request.appended
        self._given_rows = sequence.request.prompt.ready_rows  # rows of the prompt that have their vector

    async def take(self) -> list[SequenceEvent]:
        """Wait for at least one event, and return all events since the last call. An empty list: the answer has ended. Raises
        SequenceFailed or EngineClosed after the last event."""
        while not self._events and not self._is_ended:
            self._changed.clear()
            await self._changed.wait()
        events, self._events = self._events, []
        if events:
            self._mailbox.note_taken(self, len(events))
        elif self._error is not None:
            raise self._error
        return events

    def give(self, rows: torch.Tensor, digest: bytes = b"") -> None:
        """Pass the vectors [n, given_width] of the next rows of a prompt whose vectors come later; see `Given`. The caller must not change
        `rows` afterwards. Raises ValueError for more rows than still need a vector, and for another width."""
        self._check_width(rows)
        missing_rows = len(self.sequence.request.prompt) - self._given_rows
        if not 0 < len(rows) <= missing_rows:
            raise ValueError(f"{missing_rows} rows of the prompt are without their vector, {len(rows)} were given")
        entry = Given(self._given_rows, rows, digest)
        self._given_rows += len(rows)
        self._mailbox.give(self, entry)

    def append(self, rows: torch.Tensor, *, end: bool = False) -> None:
        """Pass vectors [n, given_width] for the next items of the answer; n may be 0 with `end`. end: no more vectors come. The caller must
        not change `rows` afterwards.

        Vectors for more items than the answer may have are dropped. Raises ValueError after the end, for a request that needs none, and for
        another width."""
        if self._appended_all:
            raise ValueError("no rows are taken: the request takes none, or the last one was given")
        self._check_width(rows)
        rows = rows[: self._appendable]
        self._appendable -= len(rows)
        self._appended_all = end
        if len(rows) or end:
            self._mailbox.append(self, rows, end)

    def _check_width(self, rows: torch.Tensor) -> None:
        if rows.ndim != 2 or rows.shape[1] != self._given_width:
            raise ValueError(f"rows of the width {self._given_width} are taken, not {list(rows.shape)}")

    async def aclose(self) -> None:
        """Cancel the request if it still runs, and wait until the engine has ended it, and freed its pages."""
        if not self._is_ended:
            self._mailbox.cancel(self)
        while not self._is_ended:
            self._changed.clear()
            await self._changed.wait()

    def deliver(self, part: StreamOutput) -> None:
        """Add the output of a step. Called on the reader's event loop."""
        self._events += part.events
        self._is_ended = self._is_ended or part.is_ended
        self._error = self._error or part.error
        self._changed.set()


@dataclass(slots=True)
class StreamOutput:
    """The output of a step for one stream. is_ended: no more events come. error: raised to the reader after the events; None: no error."""

    events: list[SequenceEvent] = field(default_factory=list)
    is_ended: bool = False
    error: End | None = None


class StepOutputs:
    """Collects the outputs of a step for all streams, then delivers them."""

    def __init__(self) -> None:
        self._parts: dict[SequenceStream, StreamOutput] = {}

    def put(self, stream: SequenceStream, event: SequenceEvent) -> None:
        self._parts.setdefault(stream, StreamOutput()).events.append(event)

    def end(self, stream: SequenceStream, error: End | None) -> None:
        part = self._parts.setdefault(stream, StreamOutput())
        part.is_ended, part.error = True, error

    def send(self) -> list[SequenceStream]:
        """Deliver the outputs; each event loop is woken once. Returns the streams whose event loop is closed: nobody will read them."""
        parts, self._parts = self._parts, {}
        loops: dict[asyncio.AbstractEventLoop, list[SequenceStream]] = {}
        for stream in parts:
            loops.setdefault(stream.loop, []).append(stream)
        orphans: list[SequenceStream] = []
        for loop, streams in loops.items():
            try:
                loop.call_soon_threadsafe(_deliver, [(stream, parts[stream]) for stream in streams])
            except RuntimeError:
                orphans += streams
        return orphans


def _deliver(parts: Iterable[tuple[SequenceStream, StreamOutput]]) -> None:
    for stream, part in parts:
        stream.deliver(part)
