"""How many rows of long runs a step takes, so that those who decode do not wait long. Decides when rows are computed, never what they
become.

A step costs what its decoding rows cost alone, which is mostly reading the weights, and something for each row of long runs, which is next
to nothing where a processor multiplies 32 rows as fast as one, and nearly all where it does not. Both are learned from the steps that were
run. A step with long runs then takes at most SLOWER times what it takes without, so whoever decodes keeps more than half of its pace; or
BESIDE_S, where that is more.
"""

from __future__ import annotations

STEP_S = 0.05
"""What a step may take where nobody decodes: a short prompt may come behind a long one."""

BESIDE_S = 0.01
"""What a step may take in any case: nobody reads or hears a hundred tokens a second."""

SLOWER = 1.8
"""How much longer a step may take with long runs than without."""

BLOCK_ROWS = 32
"""Rows that a product takes in one go. No other block is begun for a few."""

LEAST_ROWS = 4
"""Rows of long runs in a step at least, if so many are waiting: a measurement that went wrong is not to stop a prompt."""

PROBED = 16
"""Steps with long runs after which one has a single row of them: what decoding rows cost alone is to be known however busy the machine was
when it was measured last."""

_WEIGHT = 0.2
"""Of the newest measurement of a row."""

_LIGHT_WEIGHT = 0.5
"""Of the newest measurement of a step without long runs, where it is more than before."""


class Pace:
    """Learns from the steps that were run. most_rows: of a step. step_s: None for no bound in time."""

    def __init__(self, most_rows: int, step_s: float | None = STEP_S) -> None:
        self._most_rows, self._step_s = most_rows, step_s
        self._light_s: dict[int, float] = {}
        """By the number of decoding rows: seconds of a step without long runs."""
        self._heavy = PROBED
        """Steps with long runs since the last one without. None was measured yet."""
        self._row_s = 0.0

    def long_rows(self, decoding: int) -> int:
        """Rows of long runs in the next step, beside `decoding` rows of others."""
        most = max(self._most_rows - decoding, 1)
        if self._step_s is None:
            return most
        if decoding and self._heavy >= PROBED:
            self._heavy = 0
            return 1
        light_s = self._light(decoding)
        step_s = max(min(BESIDE_S, self._step_s), SLOWER * light_s) if decoding else self._step_s
        in_time = int((step_s - light_s) / self._row_s) if self._row_s else 0
        least = LEAST_ROWS if decoding else BLOCK_ROWS
        return min(max(_filled(in_time, decoding), least), most)

    def ran(self, decoding: int, long: int, seconds: float) -> None:
        """A step of so many decoding rows and rows of long runs took so long."""
        if long <= 1:
            alone_s = max(seconds - long * self._row_s, seconds / 2)
            before = self._light_s.get(decoding, alone_s)
            # One that took longer may have been held up, however long: it counts for little. One that took less was not.
            self._light_s[decoding] = alone_s if alone_s < before else before + _LIGHT_WEIGHT * (min(alone_s, 2 * before) - before)
            self._heavy = 0
            return
        self._heavy += 1
        row_s = max(seconds - self._light(decoding), 0.0) / long
        self._row_s += (row_s - self._row_s) * (_WEIGHT if self._row_s else 1.0)

    def _light(self, decoding: int) -> float:
        """Seconds of a step of so many decoding rows alone: as measured with the number next to it. 0 if that was never measured."""
        if not decoding or not self._light_s:
            return 0.0
        return self._light_s[min(self._light_s, key=lambda rows: (abs(rows - decoding), rows))]


def _filled(long: int, decoding: int) -> int:
    """So many rows of long runs, without those that would begin another block, if they are few."""
    few = (decoding + long) % BLOCK_ROWS
    return long - few if 2 * few < min(BLOCK_ROWS, long) else long
