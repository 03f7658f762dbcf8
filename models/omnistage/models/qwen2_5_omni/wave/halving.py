"""Whether a second thread is worth it now: on a busy machine each of two halves waits for a core, and the step for the later one."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

WORTH = 0.9
"""Part of its time that an evaluation may still take when another thread does half of it."""

FIRST_PAUSE, LONGEST_PAUSE = 8, 64
"""Steps on one thread after one on two that was too slow; twice as many each time that the next attempt is too slow as well."""


class Halving:
    """alone: seconds that a step of a shape takes on one thread, of the shapes that two threads may share."""

    def __init__(self, alone: Mapping[Hashable, float]) -> None:
        self._alone = alone
        self._pause, self._left = FIRST_PAUSE, 0

    def worth(self, shape: Hashable) -> bool:
        """Asked before each step for which there is a second thread."""
        if shape not in self._alone:
            return False
        if self._left:
            self._left -= 1
            return False
        return True

    def took(self, shape: Hashable, seconds: float) -> None:
        """A step on two threads took so long, by the clock on the wall."""
        if seconds <= WORTH * self._alone[shape]:
            self._pause = FIRST_PAUSE
            return
        self._left, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
