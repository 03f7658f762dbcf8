"""Rows of long runs in a step, on processors with different costs of a row. Seconds come from arithmetic; there is no clock."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnistage.engine.scheduler import BESIDE_S, BLOCK_ROWS, LEAST_ROWS, PROBED, SLOWER, Pace

MOST_ROWS = 512
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
    pace, cost = Pace(MOST_ROWS), bound_by_arithmetic(base_s, row_s)
    for beside, long, seconds in before:
        pace.ran(beside, long, seconds)
    alone_s = cost(decoding)
    for long, seconds in settled(pace, decoding, cost):
        assert LEAST_ROWS <= long <= MOST_ROWS - decoding
        assert long == LEAST_ROWS or seconds <= max(2 * alone_s, 1.2 * BESIDE_S)


@given(base_s=st.floats(1e-4, 1.0), row_s=st.floats(1e-5, 0.1), decoding=st.integers(1, 64))
def test_a_prompt_gets_what_is_left(base_s: float, row_s: float, decoding: int) -> None:
    """A step has at least about half of the rows for which there is time."""
    cost = bound_by_arithmetic(base_s, row_s)
    alone_s = cost(decoding)
    room = (max(BESIDE_S, SLOWER * alone_s) - alone_s) / row_s
    for long, _ in settled(Pace(MOST_ROWS), decoding, cost):
        assert long >= min(room, MOST_ROWS - decoding) / 2.5 - 1


@pytest.mark.parametrize("block_s", [0.001, 0.02, 0.3])
@pytest.mark.parametrize("decoding", [1, 8, 31, 40])
def test_no_block_is_begun_for_a_few_rows(block_s: float, decoding: int) -> None:
    cost = bound_by_reading(block_s)
    for long, seconds in settled(Pace(MOST_ROWS), decoding, cost):
        assert seconds <= max(2 * cost(decoding), 2 * BESIDE_S)
        last = (decoding + long) % BLOCK_ROWS
        assert last == 0 or last >= BLOCK_ROWS // 2 or long < BLOCK_ROWS


def test_nothing_but_prompts_is_read_block_by_block() -> None:
    pace, cost = Pace(MOST_ROWS), bound_by_reading(0.2)
    for _ in range(STEPS):
        assert pace.long_rows(0) == BLOCK_ROWS
        pace.ran(0, BLOCK_ROWS, cost(BLOCK_ROWS))


def test_a_fast_device_takes_all_rows_that_a_step_may_have() -> None:
    pace = Pace(MOST_ROWS)
    for _ in range(STEPS):
        pace.ran(0, pace.long_rows(0), 1e-3)
    assert pace.long_rows(0) == MOST_ROWS
    assert Pace(MOST_ROWS, step_s=None).long_rows(12) == MOST_ROWS - 12


def test_a_step_that_took_long_once_is_forgotten() -> None:
    """A process was stopped for a minute in a step, of a prompt or of decoding rows alone: that gives others no long steps afterwards."""
    pace, cost = Pace(MOST_ROWS), bound_by_arithmetic(0.03, 0.001)
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
