"""The stream of one answer, as its reader sees it, and the mailbox in which readers leave orders for the engine's thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from omnistage.engine.request import EngineClosed, EngineFull, Given, SequenceEvent, SequenceFailed

if TYPE_CHECKING:
    from omnistage.engine.sequence import Sequence

End = SequenceFailed | EngineClosed


@dataclass(slots=True)
class Orders:
    """The orders to the engine's thread since it last collected them. asked: new requests. cancelled: requests to end. taken: number of
    events that each reader took. given: vectors of the next rows of a prompt. appended: vectors of the next items of an answer, and whether
    they are the last. closing: the engine must end."""

    asked: list[SequenceStream] = field(default_factory=list)
    cancelled: list[SequenceStream] = field(default_factory=list)
    taken: dict[SequenceStream, int] = field(default_factory=dict)
    given: list[tuple[SequenceStream, Given]] = field(default_factory=list)
    appended: list[tuple[SequenceStream, torch.Tensor, bool]] = field(default_factory=list)
    closing: bool = False

    def __bool__(self) -> bool:
        return bool(self.asked or self.cancelled or self.taken or self.given or self.appended or self.closing)


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
            self._orders.asked.append(stream)
            self._wake()

    def cancel(self, stream: SequenceStream) -> None:
        with self._changed:
            self._orders.cancelled.append(stream)
            self._wake()

    def note_taken(self, stream: SequenceStream, count: int) -> None:
        with self._changed:
            self._orders.taken[stream] = self._orders.taken.get(stream, 0) + count
            self._wake()

    def give(self, stream: SequenceStream, entry: Given) -> None:
        with self._changed:
            self._orders.given.append((stream, entry))
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
                    self._on_order()
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
        self._ended = False  # whether no more events come
        self._changed = asyncio.Event()
        self._room, self._given_width = sequence.request.max_items, given_width
        self._appended_all = not sequence.request.appended
        self._given_rows = sequence.request.prompt.ready_rows  # rows of the prompt that have their vector

    async def take(self) -> list[SequenceEvent]:
        """Wait for at least one event, and return all events since the last call. An empty list: the answer has ended. Raises
        SequenceFailed or EngineClosed after the last event."""
        while not self._events and not self._ended:
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
        entry, missing = Given(self._given_rows, rows, digest), len(self.sequence.request.prompt) - self._given_rows
        if not 0 < len(rows) <= missing:
            raise ValueError(f"{missing} rows of the prompt are without their vector, {len(rows)} were given")
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
        rows = rows[: self._room]
        self._room -= len(rows)
        self._appended_all = end
        if len(rows) or end:
            self._mailbox.append(self, rows, end)

    def _check_width(self, rows: torch.Tensor) -> None:
        if rows.ndim != 2 or rows.shape[1] != self._given_width:
            raise ValueError(f"rows of the width {self._given_width} are taken, not {list(rows.shape)}")

    async def aclose(self) -> None:
        """Cancel the request if it still runs, and wait until the engine has ended it, and freed its pages."""
        if not self._ended:
            self._mailbox.cancel(self)
        while not self._ended:
            self._changed.clear()
            await self._changed.wait()

    def deliver(self, part: StreamOutput) -> None:
        """Add the output of a step. Called on the reader's event loop."""
        self._events += part.events
        self._ended = self._ended or part.ended
        self._error = self._error or part.error
        self._changed.set()


@dataclass(slots=True)
class StreamOutput:
    """The output of a step for one stream. ended: no more events come. error: raised to the reader after the events; None: no error."""

    events: list[SequenceEvent] = field(default_factory=list)
    ended: bool = False
    error: End | None = None


class StepOutputs:
    """Collects the outputs of a step for all streams, then delivers them."""

    def __init__(self) -> None:
        self._parts: dict[SequenceStream, StreamOutput] = {}

    def put(self, stream: SequenceStream, event: SequenceEvent) -> None:
        self._parts.setdefault(stream, StreamOutput()).events.append(event)

    def end(self, stream: SequenceStream, error: End | None) -> None:
        part = self._parts.setdefault(stream, StreamOutput())
        part.ended, part.error = True, error

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
