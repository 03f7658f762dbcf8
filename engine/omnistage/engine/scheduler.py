"""The scheduler chooses which rows of which sequences the next step computes, and `Pace` how many rows of long runs, so that decoding
sequences do not wait long. Both decide when rows are computed, never their values. They use no tensor.

A step computes one row of each sequence that has exactly one row left (it decodes), and runs of consecutive rows of the sequences that have
more rows left (in their prompt or history), up to a budget of rows. A run never crosses a page.

Pace. A step takes as long as its decoding rows alone would take, mostly to read the weights, plus some time for each row of long runs. This
additional time is small if a processor multiplies 32 rows as fast as one, and nearly the whole time if it does not. Both times are learned
from past steps. A step with long runs may take at most SLOWER times as long as a step without them, so decoding sequences keep more than
half of their pace; or it may take BESIDE_S, if that is longer.

* Places. A step has a limited number of sequences. A sequence is idle if its next row has not come or nobody reads its output; then it
  keeps its pages and has no place. If more sequences have rows than there are places, clients take turns, and among the sequences of one
  client the sequences that ran longest ago are next.
* Admission. A request is admitted when there is a place, and pages for all its known rows. Clients take turns: the client with the
  fewest sequences in places is next, and among its requests the oldest. A client with at least two sequences more in places than the
  client of the request gives up the place and pages of its youngest sequence. A sequence that has been idle for IDLE_S gives up its
  pages too. No sequence gives up anything for a request that would not fit even then. A request that does not fit may be passed by later
  requests MAX_PASSED times; from then on it is overdue, and only overdue requests are admitted.
* A prompt whose vectors come later is admitted when some of them are there, with room for all of it, and starves like any other sequence
  while the next vectors have not come. As it goes on, it takes pages of equal content out of the prefix cache.
* Duration. A request that fits begins with the next step, unless a request is overdue, or MAX_TRIED requests that do not fit are looked
  at before it. While a request is overdue, the number of rows that running and other overdue sequences have left only falls, by at least
  one row in a step, and idle sequences give up their pages after IDLE_S. So the overdue request begins within as many steps as the
  others have rows left. A small request waits no longer than that for a prompt that takes half the cache, whichever of the two came
  first.
* A sequence takes pages as it fills them. If no page is left, a sequence takes the pages of an idle sequence, otherwise of the youngest
  sequence, if that is younger than itself. A sequence that lost its pages waits again, in its old place in the queue, and computes its
  rows again. The oldest sequence loses pages only while it is idle, so it always goes on, and therefore every sequence does.
* Long runs. Clients take turns run by run. Among the sequences of one client, the sequence with the fewest rows left goes first, unless
  another sequence got nothing in MAX_WAITED steps in which a later sequence got a run. So m such sequences get a run each within
  MAX_WAITED + m turns that their client gives to later sequences. Waiting for earlier sequences does not count, so prompts that come
  together are read one after the other."""

from __future__ import annotations

import bisect
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from omnistage.engine.memory import PAGE_ROWS, PagePool, PrefixCache, pages_for
from omnistage.engine.request import SequenceRequest, Taps
from omnistage.engine.sequence import Sequence

STEP_S = 0.05
"""Seconds that a step may take while no sequence decodes; few, because a short prompt may come right after a long prompt."""

BESIDE_S = 0.01
"""Seconds that a step may always take, because nobody reads or hears a hundred tokens in a second."""

SLOWER = 1.8
"""A step with long runs may take this many times as long as a step without them."""

BLOCK_ROWS = 32
"""Rows of a block: a product computes them as fast as one row. So a further block is not begun for only a few rows."""

MIN_ROWS = 4
"""A step takes at least this many rows of long runs, if so many wait, so that a wrong measurement cannot stop a prompt."""

PROBED = 16
"""After this many steps with long runs, one step takes a single row of them, to measure again how long decoding rows take alone: the last
measurement may have been made on a busy machine."""

_WEIGHT = 0.2
"""Weight of the newest measurement of a long run's row."""

_LIGHT_WEIGHT = 0.5
"""Weight of the newest measurement of a step without long runs, if it is longer than before."""


class Pace:
    """Bounds the rows of the next step by the durations of past steps. most_rows: rows that a step may have. step_s: seconds that a step
    may take while no sequence decodes; None: no step is bounded in time. `_row_s`: seconds of a long run's row; 0: not measured yet."""

    def __init__(self, most_rows: int, step_s: float | None = STEP_S) -> None:
        self._most_rows, self._step_s = most_rows, step_s
        self._light_s: dict[int, float] = {}
        """Seconds of a step without long runs, by the number of decoding rows."""
        self._heavy = PROBED
        """Number of steps with long runs since the last step without. It begins at PROBED, because no step without them was measured
        yet."""
        self._row_s = 0.0

    def long_rows(self, decoding: int) -> int:
        """Number of rows of long runs that the next step may compute. decoding: the number of other rows in this step, of sequences that
        decode."""
        max_rows = max(self._most_rows - decoding, 1)
        if self._step_s is None:
            return max_rows
        if decoding and self._heavy >= PROBED:  # A step with a single such row measures the decoding rows.
            self._heavy = 0
            return 1
        light_s = self._light_step_s(decoding)
        step_s = max(min(BESIDE_S, self._step_s), SLOWER * light_s) if decoding else self._step_s
        timely_rows = int((step_s - light_s) / self._row_s) if self._row_s else 0
        min_rows = MIN_ROWS if decoding else BLOCK_ROWS
        return min(max(_fill_blocks(timely_rows, decoding), min_rows), max_rows)

    def ran(self, decoding: int, long: int, seconds: float) -> None:
        """Learn from a step. decoding, long: its numbers of decoding rows and of rows of long runs. seconds: its duration."""
        if long <= 1:
            alone_s = max(seconds - long * self._row_s, seconds / 2)
            before = self._light_s.get(decoding, alone_s)
            # A step that took longer than before may have been delayed by other work, so it counts less, and as twice the time before at
            # most. A shorter step was not delayed.
            self._light_s[decoding] = alone_s if alone_s < before else before + _LIGHT_WEIGHT * (min(alone_s, 2 * before) - before)
            self._heavy = 0
            return
        self._heavy += 1
        row_s = max(seconds - self._light_step_s(decoding), 0.0) / long
        self._row_s += (row_s - self._row_s) * (_WEIGHT if self._row_s else 1.0)

    def _light_step_s(self, decoding: int) -> float:
        """Seconds of a step with this many decoding rows and no long runs, as measured for the nearest number of rows; 0: not measured
        yet."""
        if not decoding or not self._light_s:
            return 0.0
        return self._light_s[min(self._light_s, key=lambda rows: (abs(rows - decoding), rows))]


def _fill_blocks(long: int, decoding: int) -> int:
    """`long`, a number of rows of long runs, minus the rows that would begin another block of a product, if these are few: less than half
    of a block and of `long`. decoding: number of other rows, which fill the blocks too."""
    extra_rows = (decoding + long) % BLOCK_ROWS
    return long - extra_rows if 2 * extra_rows < min(BLOCK_ROWS, long) else long


MAX_PASSED = 16
"""Number of times that later requests may pass a waiting request."""

MAX_TRIED = 8
"""After this many requests that do not fit, a step looks at no further requests."""

MAX_WAITED = 16
"""Number of steps in which later sequences with fewer rows left may pass a sequence."""

IDLE_S = 0.5
"""Seconds that an idle sequence keeps its pages although a request waits: a reader or writer that is slow for a moment must not make it
compute its rows again."""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive rows of a sequence that a step computes: slots `start` .. `start + count - 1`, all in one page."""

    sequence: Sequence
    start: int
    count: int

    @property
    def draws(self) -> bool:
        """Whether the next item is drawn after the run: the run ends with the last known row of the sequence."""
        return self.start + self.count == self.sequence.known_rows

    @property
    def wants_taps(self) -> bool:
        """Whether taps (`request.Taps`) of some of its rows are wanted that were not put out yet."""
        first = self.sequence.taps_out
        return first is not None and self.start + self.count > first


@dataclass(frozen=True, slots=True)
class Step:
    """The runs that are computed in one pass through the decoder."""

    runs: list[Run] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.runs)

    @property
    def rows(self) -> int:
        return sum(run.count for run in self.runs)

    @property
    def sequences(self) -> int:
        """Number of sequences that have rows in the step."""
        return len({run.sequence for run in self.runs})

    @property
    def decoding(self) -> int:
        """Number of sequences that decode in the step: their run is a single row, from which an item is drawn."""
        return sum(run.count == 1 and run.draws for run in self.runs)


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of a scheduler. max_sequences: at most this many sequences are in a step, or are admitted and not idle. max_waiting: at most
    this many requests wait for their first admission. max_rows: largest number of rows in a step, except that one row of each sequence with
    a place always runs, and at least one row of longer runs."""

    max_sequences: int = 64
    max_waiting: int = 64
    max_rows: int = 512

    def __post_init__(self) -> None:
        for name in ("max_sequences", "max_waiting", "max_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class _Room:
    """The pages that were found for a waiting sequence. pages: kept pages with the content of its first rows; the sequence is a holder of
    them. taps: the taps of these pages that it must still put out. leaving: running sequences that must lose their pages first."""

    pages: list[int]
    taps: list[Taps]
    leaving: list[Sequence]


class Scheduler:
    """Holds the waiting and the running sequences, gives pages to them, and plans steps. clock: returns seconds, for IDLE_S."""

    def __init__(self, pool: PagePool, prefixes: PrefixCache, limits: SchedulerLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool, self._prefixes, self._limits, self._clock = pool, prefixes, limits, clock
        self._arrivals = 0  # number of sequences so far
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        """The waiting and the running sequences, both in order of arrival."""
        self._steps = 0  # number of steps so far
        self._turns: Counter[str] = Counter()
        """Client -> number of long runs that it has had, minus the smallest number of any client."""
        self.preemptions = 0

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        return tuple(self._waiting)

    @property
    def running(self) -> tuple[Sequence, ...]:
        return tuple(self._running)

    def can_ever_run(self, request: SequenceRequest) -> bool:
        return pages_for(request.rows) <= self._pool.total

    def add(self, sequence: Sequence) -> None:
        """Put a sequence in the queue. The caller has checked `max_waiting` and `can_ever_run`."""
        self._arrivals += 1
        sequence.number = self._arrivals
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, waiting or running. It is no error if it is neither."""
        if sequence in self._running:
            self._running.remove(sequence)
            self._give_back(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    def remember(self, sequence: Sequence) -> None:
        """Keep the sequence's full computed pages and their taps in the prefix cache, for sequences that begin alike."""
        for index, key in enumerate(sequence.page_keys(sequence.computed)):
            self._prefixes.remember(key, sequence.pages[index], sequence.taps_of_page(index))
        sequence.forget_taps()

    # Admission --------------------------------------------------------------------------------------------------------------------

    def admit(self) -> list[Sequence]:
        """Admit the waiting sequences that fit, and return them; a preempted sequence may be among them. They get the kept pages with their
        content now, and other pages as they fill them."""
        admitted: list[Sequence] = []
        refused: list[Sequence] = []
        while len(refused) < MAX_TRIED and (sequence := self._choose_next(refused)) is not None:
            if (room := self._find_room(sequence)) is not None:
                self._begin(sequence, room)
                admitted.append(sequence)
                for earlier in refused:
                    earlier.passed += earlier.number < sequence.number
            elif sequence.passed >= MAX_PASSED:
                break
            else:
                refused.append(sequence)
        return admitted

    def _choose_next(self, refused: list[Sequence]) -> Sequence | None:
        """The waiting sequence to admit next; None: there is none. refused: sequences that did not fit in this step, which are passed over.
        A sequence that could not compute anything after its admission is no candidate."""
        able = [sequence for sequence in self._waiting if not sequence.parked and sequence.able]
        overdue = [sequence for sequence in able if sequence.passed >= MAX_PASSED]
        placed = Counter(sequence.request.client for sequence in self._running if not sequence.idle)
        candidates = [sequence for sequence in overdue or able if sequence not in refused]
        return min(candidates, key=lambda sequence: (placed[sequence.request.client], sequence.number), default=None)

    def _find_room(self, sequence: Sequence) -> _Room | None:
        """Find the kept pages with the content of a sequence, and make it a holder of them; then choose running sequences to leave until
        its other pages fit. Returns None if the pages do not fit even then; the sequence is then no holder."""
        pages, taps = self._find_pages(sequence, 0)
        staying, leaving = list(self._running), list[Sequence]()
        while not self._fits(sequence, len(pages), staying, leaving):
            victim = self._choose_leaving(sequence, staying)
            if victim is None:
                self._pool.give_back(pages)
                return None
            staying.remove(victim)
            leaving.append(victim)
        return _Room(pages, taps, leaving)

    def _find_pages(self, sequence: Sequence, first: int) -> tuple[list[int], list[Taps]]:
        """(kept pages with the content of a sequence, from its page number `first` on; the taps of these pages that it must still put out).
        The sequence becomes a holder of the pages."""
        # The last known row is always computed, because the next item is drawn from it.
        keys = sequence.page_keys(sequence.known_rows - 1)
        pages, taps = self._prefixes.find(keys, sequence.taps_out, first)
        first_tapped = first + len(pages) - len(taps)  # The taps are those of the last pages.
        return pages, [Taps((first_tapped + index) * PAGE_ROWS, rows) for index, rows in enumerate(taps)]

    def _find_more(self, sequence: Sequence) -> None:
        """If the pages of a running sequence are full, add kept pages with the content of its next rows, whose vectors came after its
        admission."""
        if sequence.computed == len(sequence.pages) * PAGE_ROWS:
            pages, taps = self._find_pages(sequence, len(sequence.pages))
            sequence.pages += pages
            sequence.found_taps += taps
            sequence.computed = len(sequence.pages) * PAGE_ROWS

    def _fits(self, sequence: Sequence, kept_pages: int, staying: list[Sequence], leaving: list[Sequence]) -> bool:
        """Whether there are a place for this sequence and enough pages for its known rows and those of the staying sequences. kept_pages:
        number of kept pages that the sequence holds. leaving: sequences whose pages count as free. A preempted sequence must leave a
        further page to each staying sequence, or it would soon be preempted again."""
        if sum(not other.idle for other in staying) >= self._limits.max_sequences:
            return False
        new_pages = pages_for(sequence.known_rows) - kept_pages
        promised = sum(max(pages_for(other.known_rows) - len(other.pages), 0) for other in staying)
        spare = len(staying) if sequence.has_begun else 0
        return new_pages + promised + spare <= self._pool.free + self._pool.only_kept + self._only_held_by(leaving)

    def _only_held_by(self, sequences: list[Sequence]) -> int:
        """Number of pages that have no holders but these sequences and the prefix cache."""
        holders = Counter(page for sequence in sequences for page in sequence.pages)
        return sum(self._pool.holders(page) == count + self._pool.is_kept(page) for page, count in holders.items())

    def _choose_leaving(self, sequence: Sequence, staying: list[Sequence]) -> Sequence | None:
        """The next running sequence that gives up its place and pages for the waiting `sequence`; None: none has to."""
        now_s = self._clock()
        idle = max((other for other in staying if other.idle and now_s - other.idle_since_s >= IDLE_S), key=_arrival, default=None)
        if idle is not None:
            return idle
        # A client with at least two places more than the client of `sequence` still has no fewer places after the exchange.
        placed = Counter(other.request.client for other in staying if not other.idle)
        client, max_places = max(placed.items(), key=lambda pair: pair[1], default=("", 0))
        if max_places - placed[sequence.request.client] < 2:
            return None
        return max((other for other in staying if other.request.client == client and not other.idle), key=_arrival)

    def _begin(self, sequence: Sequence, room: _Room) -> None:
        """Make a waiting sequence a running sequence, with the pages that were found for it."""
        for victim in room.leaving:
            self._preempt(victim)
        sequence.pages, sequence.found_taps = room.pages, room.taps
        self._waiting.remove(sequence)
        bisect.insort(self._running, sequence, key=_arrival)
        sequence.computed = len(sequence.pages) * PAGE_ROWS
        sequence.passed = sequence.waited = 0
        sequence.idle_since_s = math.inf
        if not sequence.has_begun:
            sequence.queued_s = time.monotonic() - sequence.asked_s
            sequence.cached = sequence.computed

    # The step ---------------------------------------------------------------------------------------------------------------------

    def plan(self, most_rows: int) -> Step:
        """The next step; it is empty if no running sequence has a row that can be computed. most_rows: rows that sequences with more than
        one row left may get together, at least 1."""
        runs: dict[Sequence, list[Run]] = {}
        for sequence in self._running:
            if sequence.reads:
                self._find_more(sequence)
        able = self._choose_placed([sequence for sequence in self._running if not sequence.idle])
        for sequence in able:
            if sequence.rows_left == 1:
                self._add_run(sequence, 1, runs)
        self._plan_long([sequence for sequence in able if sequence.rows_left > 1], most_rows, runs)
        self._note_step(runs)
        return Step([run for ordered in runs.values() for run in ordered])

    def _note_step(self, running: Iterable[Sequence]) -> None:
        """Record which sequences have rows in this step, and since when each idle sequence is idle. running: sequences with rows."""
        self._steps += 1
        for sequence in running:
            sequence.ran = self._steps
        now_s = self._clock()
        for sequence in self._running:
            if not sequence.idle:
                sequence.idle_since_s = math.inf
            elif math.isinf(sequence.idle_since_s):
                sequence.idle_since_s = now_s

    def _choose_placed(self, sequences: list[Sequence]) -> list[Sequence]:
        """The sequences that get a place in the next step, in order of arrival. sequences: all running sequences that are not idle; there
        may be more of them than places."""
        if len(sequences) <= self._limits.max_sequences:
            return sequences
        turns: Counter[str] = Counter()
        ranked: list[tuple[int, int, Sequence]] = []
        for sequence in sorted(sequences, key=lambda sequence: (sequence.ran, sequence.number)):
            turns[sequence.request.client] += 1
            ranked.append((turns[sequence.request.client], sequence.ran, sequence))
        ranked.sort(key=lambda rank: rank[:2])
        return sorted((sequence for *_, sequence in ranked[: self._limits.max_sequences]), key=_arrival)

    def _plan_long(self, sequences: list[Sequence], most_rows: int, runs: dict[Sequence, list[Run]]) -> None:
        """Add runs of sequences that have more than one row left to `runs`, at most `most_rows` rows in all. See "Long runs" above."""
        self._take_turns(sequence.request.client for sequence in sequences)
        waiting, rows = list(sequences), 0
        while waiting and rows < most_rows:
            sequence = min(waiting, key=lambda sequence: (self._turns[sequence.request.client], *_rank(sequence, runs)))
            run = self._add_run(sequence, most_rows - rows, runs)
            if run is None or run.start + run.count == sequence.ready:
                waiting.remove(sequence)
            if run is not None:
                self._turns[sequence.request.client] += 1
                sequence.waited = 0
                rows += run.count
        for sequence in sequences:
            if sequence not in runs and any(_came_later(other, sequence) for other in sequences if other in runs):
                sequence.waited += 1

    def _add_run(self, sequence: Sequence, most_rows: int, runs: dict[Sequence, list[Run]]) -> Run | None:
        """Add the next run of a sequence to `runs`, after the runs that the sequence has in this step already, and return it. If no page is
        free for it, another sequence is preempted and loses its runs. Returns None if no page can be had, or if the sequence itself was
        preempted."""
        if sequence not in self._running:
            return None
        earlier_runs = runs.get(sequence)
        start = earlier_runs[-1].start + earlier_runs[-1].count if earlier_runs else sequence.computed
        while start // PAGE_ROWS >= len(sequence.pages):
            if self._pool.free or self._prefixes.make_room():
                sequence.pages.append(self._pool.take())
            elif (victim := self._choose_victim(sequence)) is not None:
                self._preempt(victim)
                runs.pop(victim, None)
            else:
                return None
        run = Run(sequence, start, min(sequence.ready - start, PAGE_ROWS - start % PAGE_ROWS, most_rows))
        runs.setdefault(sequence, []).append(run)
        return run

    def _take_turns(self, clients: Iterable[str]) -> None:
        """Forget the turns of all other clients. A new client begins with the count of the client that had the fewest."""
        clients = set(clients)
        min_turns = min((self._turns[client] for client in clients if client in self._turns), default=0)
        self._turns = Counter({client: self._turns.get(client, min_turns) - min_turns for client in clients})

    # Pages are given and taken ----------------------------------------------------------------------------------------------------

    def _choose_victim(self, sequence: Sequence) -> Sequence | None:
        """The sequence that must lose its pages to this one: the youngest idle sequence, otherwise the youngest of all that are younger
        than this one; None: there is none."""
        others = [other for other in self._running if other.pages and other is not sequence]
        idle = max((other for other in others if other.idle), key=_arrival, default=None)
        return idle or max((other for other in others if other.number > sequence.number), key=_arrival, default=None)

    def _preempt(self, sequence: Sequence) -> None:
        """Take all pages from a running sequence, which then waits for admission and computes its rows a second time. Its full pages stay
        in the prefix cache until a page is needed."""
        self.preemptions += 1
        self.remember(sequence)
        self._running.remove(sequence)
        self._give_back(sequence)
        bisect.insort(self._waiting, sequence, key=_arrival)

    def _give_back(self, sequence: Sequence) -> None:
        self._pool.give_back(sequence.pages)
        sequence.pages = []
        sequence.computed = 0


def _arrival(sequence: Sequence) -> int:
    return sequence.number


def _came_later(sequence: Sequence, than: Sequence) -> bool:
    """Whether `sequence` arrived later than `than` and has the same client."""
    return sequence.number > than.number and sequence.request.client == than.request.client


def _rank(sequence: Sequence, runs: dict[Sequence, list[Run]]) -> tuple[int, int, int]:
    """Sort key for sequences of one client that have more than one row left; the sequence with the smallest key gets the next run. First
    come those that waited too long and have no run in this step yet, then those with the fewest rows left, then the oldest."""
    overdue = sequence.waited if sequence.waited >= MAX_WAITED and sequence not in runs else 0
    return -overdue, sequence.rows_left, sequence.number
