"""An imagined listener who plays the sound that Code2Wav makes. The player counts the times without anything to play."""

from __future__ import annotations

GRACE_S = 0.02
"""Nobody notices a sound that is late by less: the way to the listener takes as long."""


class Playhead:
    """Plays in real time, beginning `prebuffer_s` after the first sound. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._dry_at: float | None = None
        self.underruns = 0
        self.starved_s = 0.0

    def hear(self, now: float, seconds: float, prebuffer_s: float = 0.0) -> None:
        """Note that this many seconds of sound came. prebuffer_s: told with the first sound."""
        if self._dry_at is None:
            self._dry_at = now + prebuffer_s
        elif (late := now - self._dry_at) > GRACE_S:
            self.underruns += 1
            self.starved_s += late
            self._dry_at = now
        self._dry_at += seconds

    def pause(self, seconds: float) -> None:
        """Note that the listener took no sound for this long, and does not lack it."""
        if self._dry_at is not None:
            self._dry_at += seconds
