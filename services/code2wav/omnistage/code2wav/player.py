"""An imagined player of the sound that Code2Wav makes. It counts how often and how long it has nothing to play."""

from __future__ import annotations

GRACE_S = 0.02
"""Sound that is late by fewer seconds does not count as late, because its way to the listener takes as long."""


class Playhead:
    """Plays in real time, beginning `prebuffer_s` after the first sound came. Times are seconds of one clock. underruns: how often there
    was nothing left to play. starved_s: how many seconds that lasted in all."""

    def __init__(self) -> None:
        self._dry_at: float | None = None  # when all sound so far is played; None: none has come
        self.underruns = 0
        self.starved_s = 0.0

    def hear(self, now_s: float, seconds: float, prebuffer_s: float = 0.0) -> None:
        """Note that `seconds` of sound came at the time `now_s`. prebuffer_s: counts only with the first sound."""
        if self._dry_at is None:
            self._dry_at = now_s + prebuffer_s
        elif (late_s := now_s - self._dry_at) > GRACE_S:
            self.underruns += 1
            self.starved_s += late_s
            self._dry_at = now_s
        self._dry_at += seconds

    def pause(self, seconds: float) -> None:
        """Note that the client itself accepted no sound for `seconds`, so that this time does not count as starved."""
        if self._dry_at is not None:
            self._dry_at += seconds
