"""A listener as Code2Wav imagines one: who plays what it makes, and whether there is always something to play."""

from __future__ import annotations

GRACE_S = 0.02
"""A sound that is late by less is none that anybody misses: the way to the listener takes as long."""


class Player:
    """Plays in real time, beginning `prebuffer_s` after the first sound. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._dry_at: float | None = None
        self.underruns = 0
        self.starved_s = 0.0

    def hear(self, now: float, seconds: float, prebuffer_s: float = 0.0) -> None:
        """So much sound came. prebuffer_s: of the first sound."""
        if self._dry_at is None:
            self._dry_at = now + prebuffer_s
        elif (late := now - self._dry_at) > GRACE_S:
            self.underruns += 1
            self.starved_s += late
            self._dry_at = now
        self._dry_at += seconds

    def pause(self, seconds: float) -> None:
        """The listener took no sound for so long, and has no lack of it."""
        if self._dry_at is not None:
            self._dry_at += seconds
