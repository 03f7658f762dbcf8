"""No page is lost or held twice, the oldest always goes on, everyone ends, and nobody is passed for longer than is said."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from omnistage.engine import scheduler as policy
from omnistage.engine.pages import PAGE_ROWS, OutOfPages, PagePool, PrefixCache, pages_for
from omnistage.engine.request import Prompt, SequenceRequest
from omnistage.engine.scheduler import IDLE_S, MAX_PASSED, MAX_TRIED, MAX_WAITED, Limits, Run, Scheduler, Step
from omnistage.engine.sequence import MAX_UNREAD, Sequence

PAGES = 24
ROW = torch.zeros(1, 1)
STEP_S = IDLE_S / 4


def request(prompt: int, answer: int = 20, history: int = 0, start: int = 0, client: str = "", appended: bool = False) -> SequenceRequest:
    return SequenceRequest(
        Prompt.of_tokens(range(start, start + prompt)),
        0,
        history + answer,
        history=tuple((index,) for index in range(history)),
        client=client,
        appended=appended,
    )


requests = st.builds(
    request,
    prompt=st.integers(1, 300),
    answer=st.integers(1, 120),
    history=st.integers(0, 80),
    start=st.sampled_from([0, 0, 1000]),
    client=st.sampled_from(["", "a", "b"]),
    appended=st.booleans(),
).filter(lambda made: pages_for(made.rows) <= PAGES)


class House:
    """A scheduler whose steps cost nothing: what a runner would do to the sequences, and the rules it relies on."""

    def __init__(self, max_sequences: int = 8, pages: int = PAGES, kept: int = 8) -> None:
        self.limits = Limits(max_sequences=max_sequences)
        self.pool = PagePool(pages)
        self.prefixes = PrefixCache(self.pool, kept)
        self.now_s = 0.0
        self.passed: Counter[Sequence] = Counter()
        self.scheduler = Scheduler(self.pool, self.prefixes, self.limits, lambda: self.now_s)

    def add(self, made: SequenceRequest) -> Sequence:
        sequence = Sequence(made)
        self.scheduler.add(sequence)
        return sequence

    def fits(self, sequence: Sequence) -> bool:
        """Whether there is a place and room, though nobody leaves and nothing of it is kept."""
        running = self.scheduler.running
        promised = sum(max(pages_for(other.known) - len(other.pages), 0) for other in running) + sequence.begun * len(running)
        placed = sum(not other.idle for other in running)
        room = self.pool.free + self.pool.only_kept - promised
        return placed < self.limits.max_sequences and pages_for(sequence.known) <= room

    def left(self, overdue: set[Sequence]) -> int:
        """Rows that those have left that run, or are overdue and wait."""
        counted = [*self.scheduler.running, *(sequence for sequence in self.scheduler.waiting if sequence in overdue)]
        return sum(sequence.request.rows - sequence.computed for sequence in counted)

    def check_turns(self, able: list[Sequence], overdue: set[Sequence], admitted: list[Sequence]) -> None:
        """Who was admitted, of those that could go on when it began; `passed` is counted here by itself."""
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
        able = [sequence for sequence in self.scheduler.waiting if not sequence.parked and sequence.ready == sequence.known]
        overdue = {sequence for sequence in able if sequence.passed >= policy.MAX_PASSED}
        is_room = any(map(self.fits, able)) and not overdue and len(able) <= MAX_TRIED
        left = self.left(overdue)
        admitted = self.scheduler.admit()
        assert admitted or not is_room, "there is room and nobody is admitted"
        self.check_turns(able, overdue, admitted)
        assert admitted or self.scheduler.preemptions == before, "pages were taken for nobody"
        for sequence in admitted:
            sequence.begun = True
            assert sequence.computed == len(sequence.pages) * PAGE_ROWS < sequence.known
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


class Scheduling(RuleBasedStateMachine):
    """Anything that callers and readers may do, in any order, against a count of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        # With the usual number nobody would be overdue in so short a life.
        policy.MAX_PASSED = 2
        self.house = House()
        self.alive: list[Sequence] = []
        self.fed: set[Sequence] = set()
        """Those whose last row has come."""

    @property
    def hungry(self) -> list[Sequence]:
        return [sequence for sequence in self.alive if sequence.request.appended and sequence not in self.fed]

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

    @rule(most_rows=st.sampled_from([1, 23, 64, 512]), times=st.integers(1, 12))
    def run(self, most_rows: int, times: int) -> None:
        for _ in range(times):
            oldest = next((sequence for sequence in self.scheduler.running if not sequence.idle), None)
            step = self.house.step(most_rows)
            if oldest is not None and oldest.left > 0 and not self.ended(oldest):
                assert oldest in self.scheduler.running, "the oldest that can go on lost its pages"
            if oldest is not None:
                assert step, "somebody could go on and nobody did"
            self.alive = [sequence for sequence in self.alive if not self.ended(sequence)]

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        held = Counter(page for sequence in self.scheduler.running for page in sequence.pages)
        kept = Counter(kept.page for kept in self.house.prefixes._kept.values())
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
            assert sequence.computed <= sequence.ready <= sequence.known
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


def test_a_large_request_is_passed_a_bounded_number_of_times() -> None:
    house = House(max_sequences=4)
    runner = house.add(request(32, 400))
    house.step()
    large = house.add(request(PAGES * PAGE_ROWS - 10, 10, start=5000))
    passed = 0
    while large not in house.scheduler.running:
        small = house.add(request(1, 2, start=900))
        house.step()
        house.step()
        passed += bool(small.items)
        assert passed <= MAX_PASSED + 1 or runner in house.scheduler.running
    assert MAX_PASSED <= passed <= MAX_PASSED + 1


def test_a_small_request_waits_for_a_prompt_of_half_the_cache_no_longer_than_others_have_rows_left() -> None:
    """It begins at once while the prompt runs, and when that cannot begin, until it is overdue; then within the rows of those that run."""
    house = House(kept=0)
    half = PAGES // 2 * PAGE_ROWS
    large = house.add(request(half, 60))
    for index in range(40):
        small = house.add(request(20, 1, start=1000 + 50 * index))
        house.step()
        assert small.items
    while len(large.items) != 60:
        house.step()
    runners = [house.add(request(100, 200, start=5000 + 1000 * index)) for index in range(2)]
    for _ in range(110):
        house.step(most_rows=512)
    large = house.add(request(half, 60, start=9000))
    at_once = longest = 0
    while any(map(house.scheduler.running.__contains__, runners)):
        small = house.add(request(20, 1, start=20000 + 50 * at_once))
        left, steps = house.left(set()), 0
        while not small.items:
            house.step()
            steps += 1
        at_once += steps == 1
        longest = max(longest, steps)
        assert steps <= left
    assert at_once == MAX_PASSED and longest > 1 and large in house.scheduler.running


def test_decoding_goes_on_while_prompts_are_computed() -> None:
    house = House()
    first = house.add(request(3, 100))
    house.step()
    house.add(request(200, 5))
    for expected in range(2, 8):
        house.step(most_rows=PAGE_ROWS)
        assert len(first.items) == expected


def test_a_short_prompt_goes_before_a_long_one_and_the_long_one_is_not_passed_for_ever() -> None:
    house = House(max_sequences=60, pages=300)
    long = house.add(request(320, 1))
    house.step(most_rows=PAGE_ROWS)
    steps_without = 0
    steps = 0
    while not long.items:
        short = house.add(request(20, 1, start=1000 + 50 * steps))
        before = long.computed
        step = house.step(most_rows=20)
        steps += 1
        steps_without = 0 if long.computed > before else steps_without + 1
        assert steps_without <= MAX_WAITED + 1
        if steps < MAX_WAITED:
            assert [run.sequence for run in step.runs] == [short]
    # Pages of 32 rows are read in runs of 20 and 12.
    assert steps <= 20 * (MAX_WAITED + 2)


def test_prompts_that_come_together_are_read_one_after_the_other() -> None:
    """However long that takes: to read all of them a little would let all of them wait for the last."""
    house = House(max_sequences=60, pages=300)
    prompts = [house.add(request(40, 100, start=50 * index)) for index in range(30)]
    while not all(prompt.items for prompt in prompts):
        house.step(most_rows=7)
        assert sum(0 < prompt.computed < 40 for prompt in prompts) <= 1
        assert [bool(prompt.items) for prompt in prompts] == sorted((bool(prompt.items) for prompt in prompts), reverse=True)


def test_a_sequence_whose_row_has_not_come_has_no_place() -> None:
    house = House(max_sequences=4, pages=400)
    starved = [house.add(request(40, 100, start=100 * index, client="a", appended=True)) for index in range(4)]
    house.step(most_rows=512)
    assert all(sequence.starved for sequence in starved)
    others = [house.add(request(40, 100, start=1000 + 100 * index, client=client)) for index, client in enumerate("aabb")]
    house.step(most_rows=512)
    assert all(sequence.items for sequence in others) and all(sequence.pages for sequence in starved)
    assert house.scheduler.preemptions == 0


def test_a_request_that_is_not_admitted_costs_nobody_its_pages() -> None:
    """Neither those of a client with more, nor those of one that starves at every other step."""
    house = House(max_sequences=8, pages=24)
    running = [house.add(request(32, 200, start=1000 * index, client="a")) for index in range(2)]
    starving = house.add(request(32, 200, start=5000, client="a", appended=True))
    house.step()
    for _ in range(40):
        house.step()
    house.add(request(730, 20, start=9000, client="b"))
    computed = 0
    for _ in range(100):
        starving.append(ROW, False)
        computed += house.step(most_rows=512).rows
    assert house.scheduler.preemptions == 0 and all(sequence.pages for sequence in running)
    assert computed <= 300


def test_who_is_idle_for_a_moment_keeps_its_pages_and_who_is_for_long_does_not() -> None:
    house = House(pages=24)
    starving = house.add(request(500, 20, appended=True))
    house.step(most_rows=512)
    waiting = house.add(request(500, 20, start=2000))
    steps = 0
    while not waiting.items:
        assert steps <= IDLE_S / STEP_S + 1
        assert bool(starving.pages) == (waiting not in house.scheduler.running)
        house.step(most_rows=512)
        steps += 1
    assert steps >= IDLE_S / STEP_S and house.scheduler.preemptions == 1


def test_more_that_woke_than_there_are_places_go_on_in_turns() -> None:
    """The first client has three times as many as the second, and both the same rows."""
    house = House(max_sequences=4, pages=400)
    mine, yours = [
        [house.add(request(8, 400, client=client, appended=True)) for _ in range(count)] for client, count in (("a", 12), ("b", 4))
    ]
    for _ in range(8):
        house.step(most_rows=512)
    for sequence in (*mine, *yours):
        assert len(sequence.items) == 1
        sequence.append(ROW.expand(200, 1), False)
    for _ in range(60):
        step = house.step(most_rows=512)
        assert sorted(run.sequence.request.client for run in step.runs) == ["a", "a", "b", "b"]
    assert {len(sequence.items) for sequence in mine} == {11}
    assert {len(sequence.items) for sequence in yours} == {31}
    assert house.scheduler.preemptions == 0


def test_clients_take_turns_whatever_one_of_them_asks() -> None:
    house = House(max_sequences=8, pages=400)
    for index in range(6):
        house.add(request(320, 1, start=400 * index, client="greedy"))
    house.step(most_rows=PAGE_ROWS)
    modest = house.add(request(320, 1, start=9000, client="modest"))
    steps = 0
    while not modest.items:
        house.step(most_rows=PAGE_ROWS)
        steps += 1
    assert steps <= 2 * 10 + 1


def test_a_client_with_less_gets_a_place_of_the_one_that_has_more_and_no_more_than_its_share() -> None:
    house = House(max_sequences=4, pages=400)
    greedy = [house.add(request(3, 400, client="greedy")) for _ in range(20)]
    for _ in range(5):
        house.step()
    modest = [house.add(request(3, 400, client="modest")) for _ in range(6)]
    house.step()
    house.step()
    running = [sequence.request.client for sequence in house.scheduler.running]
    assert sorted(running) == ["greedy", "greedy", "modest", "modest"]
    assert all(sequence.items for sequence in modest[:2])
    assert greedy[0] in house.scheduler.running and greedy[1] in house.scheduler.running
    before = house.scheduler.preemptions
    for _ in range(50):
        house.step()
    assert house.scheduler.preemptions == before, "shares that are equal are left alone"


def test_a_client_with_less_gets_pages_of_the_one_that_has_more() -> None:
    house = House(max_sequences=8, pages=16, kept=0)
    for index in range(4):
        house.add(request(100, 300, start=1000 * index, client="greedy"))
    for _ in range(20):
        house.step(most_rows=512)
    modest = house.add(request(100, 20, start=9000, client="modest"))
    for _ in range(2):
        house.step(most_rows=512)
    assert modest.items


def test_small_requests_run_beside_giants_whose_answers_would_fill_the_cache() -> None:
    house = House(max_sequences=8)
    for index in range(3):
        house.add(request(10, PAGES * PAGE_ROWS - 20, start=100 * index))
    house.step()
    small = [house.add(request(20, 5, start=5000 + 100 * index)) for index in range(30)]
    for _ in range(200):
        house.step()
    assert all(len(sequence.items) == 5 for sequence in small)


def test_the_youngest_loses_its_pages_and_idle_ones_before_it() -> None:
    house = House(max_sequences=4, pages=12, kept=0)
    oldest, idle, youngest = (house.add(request(100, 200, start=1000 * index)) for index in range(3))
    for _ in range(8):
        house.step(most_rows=512)
    assert len(house.scheduler.running) == 3
    idle.unread = MAX_UNREAD
    while len(house.scheduler.running) == 3:
        house.step()
    assert house.scheduler.waiting == (idle,)
    while len(house.scheduler.running) == 2:
        house.step()
    assert house.scheduler.running == (oldest,)
    items = len(youngest.items)
    assert house.scheduler.waiting == (idle, youngest)
    while len(oldest.items) != 200:
        house.step()
    while len(youngest.items) == items:
        house.step()
    assert youngest in house.scheduler.running


def test_a_page_is_freed_exactly_once() -> None:
    pool = PagePool(3)
    pages = [pool.take(), pool.take()]
    assert pool.changes() == (pages, [])
    pool.share(pages[:1])
    pool.give_back(pages)
    assert pool.changes() == ([], pages[1:])
    pool.give_back(pages[:1])
    assert pool.changes() == ([], pages[:1])
    assert pool.free == 3
    with pytest.raises(ValueError, match="twice"):
        pool.give_back(pages[:1])
    with pytest.raises(ValueError, match="free"):
        pool.share(pages)
    again = pool.take()
    pool.give_back([again])
    assert pool.changes() == ([], [again])
    for _ in range(3):
        pool.take()
    with pytest.raises(OutOfPages):
        pool.take()


def test_pages_that_only_the_cache_holds_are_counted_and_go_first_however_many_others_hold() -> None:
    pool = PagePool(100)
    prefixes = PrefixCache(pool, 100)
    pages = [pool.take() for _ in range(100)]
    for page in pages:
        prefixes.remember(b"%d" % page, page, None)
    assert pool.only_kept == 0 and not prefixes.make_room()
    with pytest.raises(ValueError, match="kept already"):
        pool.keep(pages[0])
    for index in range(40, 60):
        pool.give_back(pages[index : index + 1])
        assert pool.only_kept == 1
        assert prefixes.make_room() and pool.free == index - 39 and pool.only_kept == 0
    assert len(prefixes) == 80 and not pool.is_kept(pages[40]) and pool.is_kept(pages[60])
    pool.give_back([*pages[:40], *pages[60:]])
    assert pool.only_kept == 80
    prefixes.shrink(80)
    assert (pool.only_kept, pool.free) == (0, 100)


def test_limits_are_checked() -> None:
    for wrong in ({"max_rows": 0}, {"max_sequences": 0}, {"max_waiting": 0}):
        with pytest.raises(ValueError, match="must"):
            Limits(**wrong)
