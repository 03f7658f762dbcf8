"""Limits the Opens that a process sends to a second replica while the first one has neither answered nor been lost."""

from __future__ import annotations

SHARE = 0.05
BURST = 4.0
"""At most one Open in twenty, and a few at once: if all replicas are slow, asking twice makes them slower."""


class Hedges:
    """The number of second Opens that one process may still send: it grows by SHARE with each Open, up to BURST."""

    def __init__(self) -> None:
        self._left = BURST

    def count_open(self) -> None:
        """Count an Open, at any replica."""
        self._left = min(self._left + SHARE, BURST)

    def take(self) -> bool:
        """Take one second Open from the budget and return True; return False if the budget holds less than one."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
