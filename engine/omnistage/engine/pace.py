"""The pace of long runs: how many of their rows a step takes, so that decoding sequences do not wait long. It decides when rows are
computed, never their values.

A step takes as long as its decoding rows alone would take, mostly to read the weights, and some time more for each row of long runs. This
additional time is next to nothing if a processor multiplies 32 rows as fast as one, and nearly everything if it does not. Both times are
learned from past steps. A step with long runs then takes at most SLOWER times as long as one without, so decoding sequences keep more than
half of their pace; or it takes BESIDE_S, if that is more.
"""

from __future__ import annotations

STEP_S = 0.05
"""Longest step while no sequence decodes: a short prompt may come right after a long one."""

BESIDE_S = 0.01
"""A step may always take this long: nobody reads or hears a hundred tokens a second."""

SLOWER = 1.8
"""How much longer a step may take with long runs than without."""

BLOCK_ROWS = 32
"""Rows that a product takes in one go. A further block is not begun for only a few rows."""

LEAST_ROWS = 4
"""Fewest rows of long runs in a step, if so many are waiting: a wrong measurement must not stop a prompt."""

PROBED = 16
"""After this many steps with long runs, one step takes a single row of them: the cost of decoding rows alone must be known however busy the
machine was at its last measurement."""

_WEIGHT = 0.2
"""Weight of the newest measurement of a row."""

_LIGHT_WEIGHT = 0.5
"""Weight of the newest measurement of a step without long runs, if it is longer than before."""


class Pace:
    """Learns from the steps that were run. most_rows: most rows of a step. step_s: longest step while no sequence decodes; None: no step is
    bounded in time."""

    def __init__(self, most_rows: int, step_s: float | None = STEP_S) -> None:
        self._most_rows, self._step_s = most_rows, step_s
        self._light_s: dict[int, float] = {}
        """Seconds of a step without long runs, by the number of decoding rows."""
        self._heavy = PROBED
        """Steps with long runs since the last one without. It begins at PROBED: none without has been measured."""
        self._row_s = 0.0

    def long_rows(self, decoding: int) -> int:
        """Most rows of long runs for the next step, which also has `decoding` rows of decoding sequences."""
        most = max(self._most_rows - decoding, 1)
        if self._step_s is None:
            return most
        if decoding and self._heavy >= PROBED:
            self._heavy = 0
            return 1
        light_s = self._light_step_s(decoding)
        step_s = max(min(BESIDE_S, self._step_s), SLOWER * light_s) if decoding else self._step_s
        in_time = int((step_s - light_s) / self._row_s) if self._row_s else 0
        least = LEAST_ROWS if decoding else BLOCK_ROWS
        return min(max(_fill_blocks(in_time, decoding), least), most)

    def ran(self, decoding: int, long: int, seconds: float) -> None:
        """Note the duration of a step with these numbers of decoding rows and rows of long runs."""
        if long <= 1:
            alone_s = max(seconds - long * self._row_s, seconds / 2)
            before = self._light_s.get(decoding, alone_s)
            # A longer step may have been held up, by any amount, so it counts for little. A shorter one was not.
            self._light_s[decoding] = alone_s if alone_s < before else before + _LIGHT_WEIGHT * (min(alone_s, 2 * before) - before)
            self._heavy = 0
            return
        self._heavy += 1
        row_s = max(seconds - self._light_step_s(decoding), 0.0) / long
        self._row_s += (row_s - self._row_s) * (_WEIGHT if self._row_s else 1.0)

    def _light_step_s(self, decoding: int) -> float:
        """Seconds of a step of this many decoding rows alone, as measured with the nearest number; 0 if it was never measured."""
        if not decoding or not self._light_s:
            return 0.0
        return self._light_s[min(self._light_s, key=lambda rows: (abs(rows - decoding), rows))]


def _fill_blocks(long: int, decoding: int) -> int:
    """`long` rows of long runs, less those that would begin another block of a product, if these are few. Decoding rows fill the blocks
    too."""
    few = (decoding + long) % BLOCK_ROWS
    return long - few if 2 * few < min(BLOCK_ROWS, long) else long
