"""How long a player should wait before it plays, so that it never runs dry: what is known of the pace of codes and windows, carried on."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count

from omnistage.models.common.speech.schedule import Schedule, Window

HORIZON_S = 15.0
"""Of speech. Where sound is made slower than it is played, no wait is enough for ever: this is for as much as most answers have."""

LEARNED = 0.1
"""Part that one window has in what is known of the pace."""


class Pace:
    """How long windows take here, over how long they took at load, where nothing else ran: learned from all of them. The first window of a
    speech says little of it: the machine reads the question and begins to speak beside it."""

    def __init__(self) -> None:
        self._slowness = 1.0

    def took(self, seconds: float, expected_s: float, beside: int) -> None:
        """A window was done, of so many that were computed in turn."""
        self._slowness += LEARNED * (seconds / (expected_s * beside) - self._slowness)

    def slowness(self, beside: int) -> float:
        return self._slowness * beside


class Forecast:
    """Of one model, from all of its speeches. code_s: of sound that a code has. seconds: that a window takes which is alone on this
    machine, by its form; a window of another form tells nothing."""

    def __init__(self, code_s: float, seconds: Mapping[Hashable, float], form: Callable[[Window], Hashable]) -> None:
        self._code_s, self._seconds, self._form = code_s, seconds, form
        self._pace, self._computing = Pace(), 0

    @contextmanager
    def watching(self, window: Window, *, learning: bool) -> Iterator[None]:
        """A window is computed within it. learning: it is one like most others."""
        begun, self._computing = time.monotonic(), self._computing + 1
        beside = self._computing
        try:
            yield
        finally:
            self._computing -= 1
        if learning and (expected_s := self._seconds.get(self._form(window))) is not None:
            self._pace.took(time.monotonic() - begun, expected_s, beside)

    def prebuffer_s(self, schedule: Schedule, arrivals: Arrivals, begun: float, done: float) -> float:
        """For a speech whose first window was begun and done then, by a clock of any zero."""
        slowness, seconds, form = self._pace.slowness(max(self._computing, 1)), self._seconds, self._form
        return prebuffer_s(schedule, self._code_s, arrivals.interval_s, lambda window: slowness * seconds[form(window)], begun, done)


class Arrivals:
    """When codes came."""

    def __init__(self) -> None:
        self._first_at = self._last_at = 0.0
        self._first_count = self._count = 0

    def came(self, now: float, codes: int) -> None:
        if codes:
            if not self._count:
                self._first_at, self._first_count = now, codes
            self._last_at, self._count = now, self._count + codes

    @property
    def interval_s(self) -> float:
        """From one code to the next; 0 while all came at once."""
        return (self._last_at - self._first_at) / max(self._count - self._first_count, 1)


def prebuffer_s(
    schedule: Schedule, code_s: float, interval_s: float, decode_s: Callable[[Window], float], first_codes_at: float, heard_at: float
) -> float:
    """Seconds after the first sound at which a player that begins then has each later sound when its turn comes: the largest
    of the times at which windows will be done, less the sound before them.

    code_s: of sound that a code has. interval_s: from one code to the next as they come. decode_s: that a window takes. first_codes_at:
    when the codes of the first window were there; heard_at: when its sound was.
    """
    first = schedule.window(0, 1 << 62, ended=False)
    if first is None:
        return 0.0
    done, due, wait = heard_at, heard_at + (first.end - first.begin) * code_s, 0.0
    for number in count(1):
        window = schedule.window(number, 1 << 62, ended=False)
        if window is None or window.end * code_s >= HORIZON_S:
            break
        there = first_codes_at + (window.past - first.past) * interval_s
        done = max(there, done) + decode_s(window)
        wait = max(wait, done - due)
        due += (window.end - window.begin) * code_s
    return wait
