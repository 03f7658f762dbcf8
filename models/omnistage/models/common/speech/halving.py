"""Decides whether a second thread should take half of a step now. A second thread may make a step slower: on a busy machine each half waits
for a core, and because of Python's lock two threads with little work mostly wait for each other."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

WORTH = 0.9
"""A second thread is used if a step with it takes at most this part of its time on one thread."""

FIRST_PAUSE, LONGEST_PAUSE = 8, 64
"""After a step on two threads was too slow, FIRST_PAUSE steps of its shape run on one thread. The number doubles, up to LONGEST_PAUSE, each
time that the next attempt is too slow as well."""


class Halving:
    """Decides for each shape whether a second thread takes half of a step. step_seconds: shape -> seconds of its step on one thread, for
    the shapes that two threads may share. `_pauses`: shape -> length of its next pause, in steps."""

    def __init__(self, step_seconds: Mapping[Hashable, float]) -> None:
        self._alone = step_seconds
        self._pauses = dict.fromkeys(step_seconds, FIRST_PAUSE)
        self._left = dict.fromkeys(step_seconds, 0)
        """Shape -> number of its next steps that must run on one thread."""

    def worth(self, shape: Hashable) -> bool:
        """Whether to use a second thread. Call it once before each step for which a second thread is free."""
        if shape not in self._alone:
            return False
        if self._left[shape]:
            self._left[shape] -= 1
            return False
        return True

    def took(self, shape: Hashable, seconds: float) -> None:
        """Learn from a step on two threads, which took `seconds` by the clock. It does nothing for a shape that is not in
        `step_seconds`."""
        if shape not in self._alone:
            return
        if seconds <= WORTH * self._alone[shape]:
            self._pauses[shape] = FIRST_PAUSE
            return
        self._left[shape] = self._pauses[shape]
        self._pauses[shape] = min(2 * self._pauses[shape], LONGEST_PAUSE)
