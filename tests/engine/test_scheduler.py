"""The order of turns, case by case: places, pages and rows; holders of a page; rows of a step, whose seconds come from arithmetic: there is
no clock."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.scheduling import PAGES, STEP_S, SchedulerHouse, request
from omnistage.engine.memory import PAGE_ROWS, OutOfPages, PagePool, PrefixCache
from omnistage.engine.scheduler import (
    BESIDE_S,
    BLOCK_ROWS,
    IDLE_S,
    MAX_PASSED,
    MAX_WAITED,
    MIN_ROWS,
    PROBED,
    SLOWER,
    Pace,
    SchedulerLimits,
)
from omnistage.engine.sequence import MAX_UNREAD

ROW = torch.zeros(1, 1)


def test_a_large_request_is_passed_a_bounded_number_of_times() -> None:
    house = SchedulerHouse(max_sequences=4)
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
    """While the prompt runs, the small request begins at once. While the prompt cannot begin, it does so too, until the prompt is overdue;
    then it begins within as many steps as the running ones have rows left."""
    house = SchedulerHouse(kept=0)
    half = PAGES // 2 * PAGE_ROWS
    large = house.add(request(half, 60))
    for index in range(40):
        small = house.add(request(20, 1, start=1000 + 50 * index))
        house.step()
        assert small.items
    house.steps_until(lambda: len(large.items) == 60)
    runners = house.add_all(2, 100, 200, 1000, start=5000)
    house.steps(110, most_rows=512)
    large = house.add(request(half, 60, start=9000))
    at_once = longest = 0
    while any(map(house.scheduler.running.__contains__, runners)):
        small = house.add(request(20, 1, start=20000 + 50 * at_once))
        left = house.left(set())
        steps = house.steps_until(lambda small=small: small.items)  # type: ignore[misc]
        at_once += steps == 1
        longest = max(longest, steps)
        assert steps <= left
    assert at_once == MAX_PASSED and longest > 1 and large in house.scheduler.running


def test_decoding_goes_on_while_prompts_are_computed() -> None:
    house = SchedulerHouse()
    first = house.add(request(3, 100))
    house.step()
    house.add(request(200, 5))
    for expected in range(2, 8):
        house.step(most_rows=PAGE_ROWS)
        assert len(first.items) == expected


def test_a_short_prompt_goes_before_a_long_one_and_the_long_one_is_not_passed_for_ever() -> None:
    house = SchedulerHouse(max_sequences=60, pages=300)
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
    """However long that takes: if all of them were read a little, all of them would wait for the last."""
    house = SchedulerHouse(max_sequences=60, pages=300)
    prompts = house.add_all(30, 40, 100, 50)
    while not all(prompt.items for prompt in prompts):
        house.step(most_rows=7)
        assert sum(0 < prompt.computed < 40 for prompt in prompts) <= 1
        assert [bool(prompt.items) for prompt in prompts] == sorted((bool(prompt.items) for prompt in prompts), reverse=True)


def test_a_sequence_whose_row_has_not_come_has_no_place() -> None:
    house = SchedulerHouse(max_sequences=4, pages=400)
    starved = house.add_all(4, 40, 100, 100, client="a", appended=True)
    house.step(most_rows=512)
    assert all(sequence.starved for sequence in starved)
    others = [house.add(request(40, 100, start=1000 + 100 * index, client=client)) for index, client in enumerate("aabb")]
    house.step(most_rows=512)
    assert all(sequence.items for sequence in others) and all(sequence.pages for sequence in starved)
    assert house.scheduler.preemptions == 0


def test_a_request_that_is_not_admitted_costs_nobody_its_pages() -> None:
    """Neither a client with more sequences, nor one that starves at every other step, loses pages."""
    house = SchedulerHouse(max_sequences=8, pages=24)
    running = house.add_all(2, 32, 200, 1000, client="a")
    starving = house.add(request(32, 200, start=5000, client="a", appended=True))
    house.steps(41)
    house.add(request(730, 20, start=9000, client="b"))
    computed = 0
    for _ in range(100):
        starving.append(ROW, False)
        computed += house.step(most_rows=512).rows
    assert house.scheduler.preemptions == 0 and all(sequence.pages for sequence in running)
    assert computed <= 300


def test_who_is_idle_for_a_moment_keeps_its_pages_and_who_is_for_long_does_not() -> None:
    house = SchedulerHouse(pages=24)
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
    """The first client has three times as many sequences as the second, and both get the same rows."""
    house = SchedulerHouse(max_sequences=4, pages=400)
    mine, yours = (house.add_all(count, 8, 400, client=client, appended=True) for client, count in (("a", 12), ("b", 4)))
    house.steps(8, most_rows=512)
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
    house = SchedulerHouse(max_sequences=8, pages=400)
    house.add_all(6, 320, 1, 400, client="greedy")
    house.step(most_rows=PAGE_ROWS)
    modest = house.add(request(320, 1, start=9000, client="modest"))
    assert house.steps_until(lambda: modest.items, most_rows=PAGE_ROWS) <= 2 * 10 + 1


def test_a_client_with_less_gets_a_place_of_the_one_that_has_more_and_no_more_than_its_share() -> None:
    house = SchedulerHouse(max_sequences=4, pages=400)
    greedy = house.add_all(20, 3, 400, client="greedy")
    house.steps(5)
    modest = house.add_all(6, 3, 400, client="modest")
    house.steps(2)
    running = [sequence.request.client for sequence in house.scheduler.running]
    assert sorted(running) == ["greedy", "greedy", "modest", "modest"]
    assert all(sequence.items for sequence in modest[:2])
    assert greedy[0] in house.scheduler.running and greedy[1] in house.scheduler.running
    before = house.scheduler.preemptions
    house.steps(50)
    assert house.scheduler.preemptions == before, "shares that are equal are left alone"


def test_a_client_with_less_gets_pages_of_the_one_that_has_more() -> None:
    house = SchedulerHouse(max_sequences=8, pages=16, kept=0)
    house.add_all(4, 100, 300, 1000, client="greedy")
    house.steps(20, most_rows=512)
    modest = house.add(request(100, 20, start=9000, client="modest"))
    house.steps(2, most_rows=512)
    assert modest.items


def test_small_requests_run_beside_giants_whose_answers_would_fill_the_cache() -> None:
    house = SchedulerHouse(max_sequences=8)
    house.add_all(3, 10, PAGES * PAGE_ROWS - 20, 100)
    house.step()
    small = house.add_all(30, 20, 5, 100, start=5000)
    house.steps(200)
    assert all(len(sequence.items) == 5 for sequence in small)


def test_the_youngest_loses_its_pages_and_idle_ones_before_it() -> None:
    house = SchedulerHouse(max_sequences=4, pages=12, kept=0)
    oldest, idle, youngest = house.add_all(3, 100, 200, 1000)
    house.steps(8, most_rows=512)
    assert {*house.scheduler.running} == {oldest, idle, youngest}
    idle.unread = MAX_UNREAD
    house.steps_until(lambda: len(house.scheduler.running) != 3)
    assert [*house.scheduler.waiting] == [idle]
    house.steps_until(lambda: len(house.scheduler.running) != 2)
    assert [*house.scheduler.running] == [oldest]
    items = len(youngest.items)
    assert [*house.scheduler.waiting] == [idle, youngest]
    house.steps_until(lambda: len(oldest.items) == 200)
    house.steps_until(lambda: len(youngest.items) != items)
    assert youngest in house.scheduler.running


def test_limits_are_checked() -> None:
    for name in ("max_rows", "max_sequences", "max_waiting"):
        with pytest.raises(ValueError, match="must"):
            SchedulerLimits(**{name: 0})


# Pages --------------------------------------------------------------------------------------------------------------------------------


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


# Rows of long runs in a step, on processors with different costs of a row --------------------------------------------------------------


MAX_ROWS = 512
STEPS = 400
"""More steps than a prompt of a few thousand rows takes."""


def bound_by_arithmetic(base_s: float, row_s: float) -> Callable[[int], float]:
    """Each row costs as much as the one before."""
    return lambda rows: base_s + row_s * rows


def bound_by_reading(block_s: float) -> Callable[[int], float]:
    """A product of a few rows costs as much as one of a block."""
    return lambda rows: block_s * -(-rows // BLOCK_ROWS)


def settled(pace: Pace, decoding: int, cost: Callable[[int], float]) -> list[tuple[int, float]]:
    """Rows of long runs, and seconds, of the last steps while prompts are read, without steps that only measure."""
    steps = []
    for _ in range(STEPS):
        long = pace.long_rows(decoding)
        pace.ran(decoding, long, cost(decoding + long))
        steps.append((long, cost(decoding + long)))
    last = steps[STEPS // 2 :]
    probes = sum(long == 1 for long, _ in last)
    assert 1 <= probes <= len(last) // PROBED + 1
    return [step for step in last if step[0] > 1]


@given(
    base_s=st.floats(1e-4, 1.0),
    row_s=st.floats(1e-5, 0.1),
    decoding=st.integers(1, 64),
    before=st.lists(st.tuples(st.integers(0, 64), st.integers(0, 448), st.floats(1e-5, 10.0)), max_size=20),
)
def test_who_decodes_keeps_half_of_its_pace_where_each_row_costs(
    base_s: float, row_s: float, decoding: int, before: list[tuple[int, int, float]]
) -> None:
    """The pace is kept whatever was measured before: a busy machine, or steps of other numbers of rows."""
    pace, cost = Pace(MAX_ROWS), bound_by_arithmetic(base_s, row_s)
    for beside, long, seconds in before:
        pace.ran(beside, long, seconds)
    alone_s = cost(decoding)
    for long, seconds in settled(pace, decoding, cost):
        assert MIN_ROWS <= long <= MAX_ROWS - decoding
        assert long == MIN_ROWS or seconds <= max(2 * alone_s, 1.2 * BESIDE_S)


@given(base_s=st.floats(1e-4, 1.0), row_s=st.floats(1e-5, 0.1), decoding=st.integers(1, 64))
def test_a_prompt_gets_what_is_left(base_s: float, row_s: float, decoding: int) -> None:
    """A step has at least about half of the rows for which there is time."""
    cost = bound_by_arithmetic(base_s, row_s)
    alone_s = cost(decoding)
    room = (max(BESIDE_S, SLOWER * alone_s) - alone_s) / row_s
    for long, _ in settled(Pace(MAX_ROWS), decoding, cost):
        assert long >= min(room, MAX_ROWS - decoding) / 2.5 - 1


@pytest.mark.parametrize("block_s", [0.001, 0.02, 0.3])
@pytest.mark.parametrize("decoding", [1, 8, 31, 40])
def test_no_block_is_begun_for_a_few_rows(block_s: float, decoding: int) -> None:
    cost = bound_by_reading(block_s)
    for long, seconds in settled(Pace(MAX_ROWS), decoding, cost):
        assert seconds <= max(2 * cost(decoding), 2 * BESIDE_S)
        last = (decoding + long) % BLOCK_ROWS
        assert last == 0 or last >= BLOCK_ROWS // 2 or long < BLOCK_ROWS


def test_nothing_but_prompts_is_read_block_by_block() -> None:
    pace, cost = Pace(MAX_ROWS), bound_by_reading(0.2)
    for _ in range(STEPS):
        assert pace.long_rows(0) == BLOCK_ROWS
        pace.ran(0, BLOCK_ROWS, cost(BLOCK_ROWS))


def test_a_fast_device_takes_all_rows_that_a_step_may_have() -> None:
    pace = Pace(MAX_ROWS)
    for _ in range(STEPS):
        pace.ran(0, pace.long_rows(0), 1e-3)
    assert pace.long_rows(0) == MAX_ROWS
    assert Pace(MAX_ROWS, step_s=None).long_rows(12) == MAX_ROWS - 12


def test_a_step_that_took_long_once_is_forgotten() -> None:
    """A process was stopped for a minute in a step, of a prompt or of decoding rows alone: that gives others no long steps afterwards."""
    pace, cost = Pace(MAX_ROWS), bound_by_arithmetic(0.03, 0.001)
    settled(pace, 1, cost)
    pace.ran(1, 30, 60.0)
    pace.ran(1, 0, 60.0)
    late = 0.0
    for _ in range(STEPS):
        long = pace.long_rows(1)
        pace.ran(1, long, cost(1 + long))
        late += max(cost(1 + long) - 2 * cost(1), 0.0)
    assert late < 1.0
    assert min(long for long, _ in settled(pace, 1, cost)) >= 10
