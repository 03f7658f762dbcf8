"""How many rows of long runs a step takes, so that those who decode do not wait long. Decides when rows are computed, never what they
become.

A product of a few rows costs what one of BLOCK_ROWS costs: reading the weights. So long runs fill up the blocks that decoding rows have
begun, and a step has as many whole blocks as fit into its time. Where the last of them is nearly full there is one more: with a few rows
in each step a prompt would never be read, and those who came with it would decode without it.
"""

from __future__ import annotations

STEP_S = 0.05
"""What a step may take while others decode, or a short prompt may come behind a long one; one block is run whatever it takes."""

BLOCK_ROWS = 32
"""Rows of a product that cost hardly more than one row."""

LEAST_ROWS = BLOCK_ROWS // 2
"""Rows of long runs in a step at least, if so many are waiting."""

_WEIGHT = 0.2
"""Of the newest measurement."""


class Pace:
    """Learns from the steps that were run. most_rows: of a step. step_s: None for no bound in time."""

    def __init__(self, most_rows: int, step_s: float | None = STEP_S) -> None:
        self._most_rows, self._step_s = most_rows, step_s
        self._block_s = 0.0

    def long_rows(self, decoding: int) -> int:
        """Rows of long runs in the next step, beside `decoding` rows of others."""
        if self._step_s is None:
            return max(self._most_rows - decoding, 1)
        in_time = int(self._step_s / self._block_s) if self._block_s else 1
        blocks = max(in_time, -(-(decoding + LEAST_ROWS) // BLOCK_ROWS))
        return max(min(blocks * BLOCK_ROWS, self._most_rows) - decoding, 1)

    def ran(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long."""
        block_s = seconds / -(-rows // BLOCK_ROWS)
        self._block_s += (block_s - self._block_s) * (_WEIGHT if self._block_s else 1.0)
