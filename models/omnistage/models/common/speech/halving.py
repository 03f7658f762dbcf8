"""Whether a second thread is worth it now. On a busy machine each half waits for a core, and the step waits for the later half; two threads
with little work mostly wait for each other, because of Python's lock."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

WORTH = 0.9
"""Largest part of its time that a step may still take when another thread does half of it."""

FIRST_PAUSE, LONGEST_PAUSE = 8, 64
"""After a step on two threads was too slow, this many steps of its shape run on one thread; the number doubles each time that the next
attempt is too slow as well."""


class Halving:
    """Decides for each shape whether a second thread takes half of a step. alone: seconds that a step takes on one thread, for the shapes
    that two threads may share."""

    def __init__(self, alone: Mapping[Hashable, float]) -> None:
        self._alone = alone
        self._pauses = dict.fromkeys(alone, FIRST_PAUSE)
        self._left = dict.fromkeys(alone, 0)
        """How many steps of each shape must still run on one thread."""

    def worth(self, shape: Hashable) -> bool:
        """Whether to use the second thread. Call it before each step for which there is one."""
        if shape not in self._alone:
            return False
        if self._left[shape]:
            self._left[shape] -= 1
            return False
        return True

    def took(self, shape: Hashable, seconds: float) -> None:
        """Note the wall time of a step on two threads. A shape that is never shared is ignored."""
        if shape not in self._alone:
            return
        if seconds <= WORTH * self._alone[shape]:
            self._pauses[shape] = FIRST_PAUSE
            return
        self._left[shape] = self._pauses[shape]
        self._pauses[shape] = min(2 * self._pauses[shape], LONGEST_PAUSE)
