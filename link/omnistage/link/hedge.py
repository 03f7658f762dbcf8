"""How many Opens a process may send to a second replica before the first one has answered or is lost."""

from __future__ import annotations

SHARE = 0.05
BURST = 4.0
"""At most one Open in twenty, and a few at once: if all replicas are slow, asking twice makes them slower."""


class Hedges:
    """The budget of second Opens of one process."""

    def __init__(self) -> None:
        self._left = BURST

    def count_open(self) -> None:
        """Count an Open, at any replica."""
        self._left = min(self._left + SHARE, BURST)

    def take(self) -> bool:
        """Take one second Open out of the budget; False if the budget has none left."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
