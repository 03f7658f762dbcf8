"""Decides how many rows of long runs a step takes, so that decoding sequences do not wait long. It decides when rows are computed, never
their values.

A step takes as long as its decoding rows alone would take, mostly to read the weights, plus some time for each row of long runs. This
additional time is small if a processor multiplies 32 rows as fast as one, and nearly the whole time if it does not. Both times are learned
from past steps. A step with long runs may take at most SLOWER times as long as a step without them, so decoding sequences keep more than
half of their pace; or it may take BESIDE_S, if that is longer.
"""

from __future__ import annotations

STEP_S = 0.05
"""Seconds that a step may take while no sequence decodes; few, because a short prompt may come right after a long prompt."""

BESIDE_S = 0.01
"""Seconds that a step may always take, because nobody reads or hears a hundred tokens in a second."""

SLOWER = 1.8
"""A step with long runs may take this many times as long as a step without them."""

BLOCK_ROWS = 32
"""Rows of a block: a product computes them as fast as one row. So a further block is not begun for only a few rows."""

LEAST_ROWS = 4
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
        if decoding and self._heavy >= PROBED:
            self._heavy = 0
            return 1
        light_s = self._light_step_s(decoding)
        step_s = max(min(BESIDE_S, self._step_s), SLOWER * light_s) if decoding else self._step_s
        in_time = int((step_s - light_s) / self._row_s) if self._row_s else 0
        min_rows = LEAST_ROWS if decoding else BLOCK_ROWS
        return min(max(_fill_blocks(in_time, decoding), min_rows), max_rows)

    def ran(self, decoding: int, long: int, seconds: float) -> None:
        """Learn from a step. decoding, long: its numbers of decoding rows and of rows of long runs. seconds: its duration."""
        if long <= 1:
            alone_s = max(seconds - long * self._row_s, seconds / 2)
            before = self._light_s.get(decoding, alone_s)
            # A step that took longer than before may have been delayed by other work, so it counts less; a shorter step was not delayed.
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
    """`long`, a number of rows of long runs, minus the rows that would begin another block of a product, if these are few. decoding: number
    of other rows, which fill the blocks too."""
    extra_rows = (decoding + long) % BLOCK_ROWS
    return long - extra_rows if 2 * extra_rows < min(BLOCK_ROWS, long) else long
