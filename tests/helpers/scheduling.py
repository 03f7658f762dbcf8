"""A scheduler without an engine: its steps cost nothing, and the rules that a runner relies on are checked in each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from omnistage.engine import scheduler as policy
from omnistage.engine.memory import PAGE_ROWS, PagePool, PrefixCache, pages_for
from omnistage.engine.request import Prompt, SequenceRequest
from omnistage.engine.scheduler import IDLE_S, MAX_TRIED, Run, Scheduler, SchedulerLimits, Step
from omnistage.engine.sequence import Sequence

PAGES = 24
STEP_S = IDLE_S / 4


def request(
    prompt: int, answer: int = 20, history: int = 0, start: int = 0, client: str = "", appended: bool = False, later: bool = False
) -> SequenceRequest:
    """later: the vectors of the prompt come later."""
    return SequenceRequest(
        replace(Prompt.of_tokens(range(start, start + prompt)), given_later=later),
        0,
        history + answer,
        history=tuple((index,) for index in range(history)),
        client=client,
        appended=appended,
    )


class SchedulerHouse:
    """A scheduler whose steps cost nothing: what a runner would do to the sequences, and the rules it relies on."""

    def __init__(self, max_sequences: int = 8, pages: int = PAGES, kept: int = 8) -> None:
        self.limits = SchedulerLimits(max_sequences=max_sequences)
        self.pool = PagePool(pages)
        self.prefixes = PrefixCache(self.pool, kept)
        self.now_s = 0.0
        self.passed: Counter[Sequence] = Counter()
        self.scheduler = Scheduler(self.pool, self.prefixes, self.limits, lambda: self.now_s)

    def add(self, made: SequenceRequest) -> Sequence:
        sequence = Sequence(made)
        self.scheduler.add(sequence)
        return sequence

    def add_all(self, count: int, prompt: int, answer: int, apart: int = 0, start: int = 0, **fields: Any) -> list[Sequence]:
        """So many requests, whose prompts begin so far apart."""
        return [self.add(request(prompt, answer, start=start + apart * index, **fields)) for index in range(count)]

    def fits(self, sequence: Sequence) -> bool:
        """Whether there is a place and room, though nobody leaves and nothing of it is kept."""
        running = self.scheduler.running
        promised = sum(max(pages_for(other.known_rows) - len(other.pages), 0) for other in running) + sequence.has_begun * len(running)
        placed = sum(not other.idle for other in running)
        room = self.pool.free + self.pool.only_kept - promised
        return placed < self.limits.max_sequences and pages_for(sequence.known_rows) <= room

    def left(self, overdue: set[Sequence]) -> int:
        """Rows that those have left that run, or are overdue and wait."""
        counted = [*self.scheduler.running, *(sequence for sequence in self.scheduler.waiting if sequence in overdue)]
        return sum(sequence.request.rows - sequence.computed for sequence in counted)

    def check_turns(self, able: list[Sequence], overdue: set[Sequence], admitted: list[Sequence]) -> None:
        """Check which of the able sequences were admitted. `passed` is counted here by itself."""
        others = [sequence for sequence in admitted if sequence not in overdue]
        assert not others or overdue.issubset(admitted[: admitted.index(others[0])]), "one that is overdue was passed"
        for sequence in admitted:
            self.passed.pop(sequence, None)
        for later in others:
            for earlier in able:
                if earlier not in admitted and earlier.number < later.number and earlier.request.client == later.request.client:
                    self.passed[earlier] += 1
                    assert self.passed[earlier] <= policy.MAX_PASSED

    def check_progress(self, overdue: set[Sequence], left: int, computed: int) -> None:
        """One that is overdue waits for rows that get fewer, or for somebody to have been idle for long enough. left: before the step."""
        if computed:
            assert self.left(overdue) < left
        else:
            assert any(self.now_s - other.idle_since_s < IDLE_S for other in self.scheduler.running), "there is room for it"

    def step(self, most_rows: int = 64) -> Step:
        self.now_s += STEP_S
        before = self.scheduler.preemptions
        able = [sequence for sequence in self.scheduler.waiting if not sequence.parked and sequence.able]
        overdue = {sequence for sequence in able if sequence.passed >= policy.MAX_PASSED}
        is_room = any(map(self.fits, able)) and not overdue and len(able) <= MAX_TRIED
        left = self.left(overdue)
        admitted = self.scheduler.admit()
        assert admitted or not is_room, "there is room and nobody is admitted"
        self.check_turns(able, overdue, admitted)
        assert admitted or self.scheduler.preemptions == before, "pages were taken for nobody"
        for sequence in admitted:
            sequence.has_begun = True
            assert sequence.computed == len(sequence.pages) * PAGE_ROWS < sequence.known_rows
        if admitted:
            assert sum(not sequence.idle for sequence in self.scheduler.running) <= self.limits.max_sequences
        step = self.scheduler.plan(most_rows)
        assert len({run.sequence for run in step.runs}) <= self.limits.max_sequences
        reached: dict[Sequence, int] = {}
        for run in step.runs:
            self.check(run, reached.get(run.sequence, run.sequence.computed))
            reached[run.sequence] = run.start + run.count
        for run in step.runs:
            self.do(run)
        if overdue - set(admitted):
            self.check_progress(overdue, left, step.rows)
        return step

    def steps(self, count: int, most_rows: int = 64) -> None:
        for _ in range(count):
            self.step(most_rows)

    def steps_until(self, condition: Callable[[], object], most_rows: int = 64) -> int:
        """Their number."""
        count = 0
        while not condition():
            self.step(most_rows)
            count += 1
        return count

    def check(self, run: Run, start: int) -> None:
        sequence = run.sequence
        assert sequence in self.scheduler.running
        assert not sequence.parked
        assert run.start == start
        assert 0 < run.count <= PAGE_ROWS - run.start % PAGE_ROWS
        assert run.start + run.count <= sequence.ready
        written = sequence.pages[run.start // PAGE_ROWS]
        assert [written in other.pages for other in self.scheduler.running].count(True) == 1, "a page that others hold is written"

    def do(self, run: Run) -> None:
        sequence = run.sequence
        sequence.computed = run.start + run.count
        if run.start < len(sequence.request.prompt) <= sequence.computed:
            self.scheduler.remember(sequence)
        if run.draws:
            sequence.items.append((len(sequence.items),))
            if len(sequence.items) == sequence.request.max_items:
                self.scheduler.remember(sequence)
                self.scheduler.remove(sequence)
