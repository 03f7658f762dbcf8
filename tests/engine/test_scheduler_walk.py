"""Under any load no page is lost or held twice, the oldest sequence always goes on, every sequence ends, and none is passed more often than
allowed."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from helpers.scheduling import PAGES, SchedulerHouse, request
from omnistage.engine import scheduler as policy
from omnistage.engine.memory import PAGE_ROWS, pages_for
from omnistage.engine.request import Given, SequenceRequest
from omnistage.engine.scheduler import MAX_PASSED, Scheduler
from omnistage.engine.sequence import MAX_UNREAD, Sequence

ROW = torch.zeros(1, 1)

requests = st.builds(
    request,
    prompt=st.integers(1, 300),
    answer=st.integers(1, 120),
    history=st.integers(0, 80),
    start=st.sampled_from([0, 0, 1000]),
    client=st.sampled_from(["", "a", "b"]),
    appended=st.booleans(),
    later=st.booleans(),
).filter(lambda made: pages_for(made.rows) <= PAGES)


class Scheduling(RuleBasedStateMachine):
    """All actions of callers and readers, in any order, beside a plain count of the holders of pages."""

    def __init__(self) -> None:
        super().__init__()
        # With the usual number no request would be overdue in so short a life.
        policy.MAX_PASSED = 2
        self.house = SchedulerHouse()
        self.alive: list[Sequence] = []
        self.fed: set[Sequence] = set()
        """Sequences whose last row has come."""

    @property
    def hungry(self) -> list[Sequence]:
        return [sequence for sequence in self.alive if sequence.request.appended and sequence not in self.fed]

    @property
    def reading(self) -> list[Sequence]:
        """Sequences whose prompt still comes."""
        return [sequence for sequence in self.alive if self.missing(sequence)]

    def missing(self, sequence: Sequence) -> int:
        return len(sequence.request.prompt) - min(sequence.ready, len(sequence.request.prompt))

    def give(self, sequence: Sequence, count: int) -> None:
        sequence.give(Given(sequence.ready, ROW.expand(count, 1), b"alike"))

    @property
    def scheduler(self) -> Scheduler:
        return self.house.scheduler

    def ended(self, sequence: Sequence) -> bool:
        return len(sequence.items) == sequence.request.max_items

    @rule(made=requests)
    def ask(self, made: SequenceRequest) -> None:
        self.alive.append(self.house.add(made))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        sequence = self.alive.pop(data.draw(st.integers(0, len(self.alive) - 1)))
        self.scheduler.remove(sequence)
        self.scheduler.remove(sequence)
        assert not sequence.pages

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), unread=st.sampled_from([0, MAX_UNREAD]))
    def read_or_stop_reading(self, data: st.DataObject, unread: int) -> None:
        data.draw(st.sampled_from(self.alive)).unread = unread

    @precondition(lambda self: self.hungry)
    @rule(data=st.data(), count=st.integers(0, 40), end=st.booleans())
    def append(self, data: st.DataObject, count: int, end: bool) -> None:
        sequence = data.draw(st.sampled_from(self.hungry))
        sequence.append(ROW.expand(count, 1), end)
        if end:
            self.fed.add(sequence)

    @precondition(lambda self: self.reading)
    @rule(data=st.data(), count=st.integers(1, 300))
    def give_some(self, data: st.DataObject, count: int) -> None:
        sequence = data.draw(st.sampled_from(self.reading))
        for _ in range(0, count, PAGE_ROWS):
            if missing := self.missing(sequence):
                self.give(sequence, min(PAGE_ROWS, missing))

    @rule(most_rows=st.sampled_from([1, 23, 64, 512]), times=st.integers(1, 12))
    def run(self, most_rows: int, times: int) -> None:
        for _ in range(times):
            oldest = next((sequence for sequence in self.scheduler.running if not sequence.idle), None)
            step = self.house.step(most_rows)
            if oldest is not None and oldest.rows_left > 0 and not self.ended(oldest):
                assert oldest in self.scheduler.running, "the oldest that can go on lost its pages"
            if oldest is not None:
                assert step, "somebody could go on and nobody did"
            self.alive = [sequence for sequence in self.alive if not self.ended(sequence)]

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        held = Counter(page for sequence in self.scheduler.running for page in sequence.pages)
        kept = Counter(kept.page for kept in self.house.prefixes._entries.values())
        assert all(self.house.pool.holders(page) == held[page] + kept[page] for page in range(PAGES))
        assert self.house.pool.used == len(held | kept)
        assert self.house.pool.only_kept == len(kept.keys() - held.keys())
        assert all(self.house.pool.is_kept(page) == (page in kept) for page in range(PAGES))
        assert len(kept) <= self.house.prefixes.limit

    @invariant()
    def everyone_is_in_one_place_and_within_bounds(self) -> None:
        running, waiting = self.scheduler.running, self.scheduler.waiting
        assert sorted(sequence.number for sequence in (*running, *waiting)) == sorted(sequence.number for sequence in self.alive)
        for sequence in running:
            assert len(sequence.pages) >= pages_for(sequence.computed)
            assert sequence.computed <= sequence.ready <= sequence.known_rows
        for sequence in waiting:
            assert not sequence.pages and sequence.computed == 0

    def teardown(self) -> None:
        try:
            self.everyone_ends()
        finally:
            policy.MAX_PASSED = MAX_PASSED

    def everyone_ends(self) -> None:
        """Everyone ends once everybody reads and all rows have come: in a number of steps that counts each row once for each sequence, as
        if each had cost all others their pages."""
        for sequence in self.alive:
            sequence.unread = 0
        for sequence in self.reading:
            self.give(sequence, self.missing(sequence))
        for sequence in self.hungry:
            sequence.append(ROW[:0], True)
        bound = (1 + len(self.alive)) * sum(sequence.request.rows + 1 for sequence in self.alive)
        for _ in range(bound):
            if all(map(self.ended, self.alive)):
                break
            self.house.step()
        assert all(map(self.ended, self.alive))
        self.house.prefixes.shrink(PAGES)
        assert self.house.pool.used == 0


TestScheduling = Scheduling.TestCase
TestScheduling.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
