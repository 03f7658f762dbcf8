"""Forecasts, from the pace of codes and windows so far, how long a player should wait before it plays, so that it never runs out of
sound."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count

from omnistage.models.common.speech.schedule import Schedule, Window

HORIZON_S = 15.0
"""Seconds of speech that the forecast covers. If sound is made more slowly than it is played, no wait is long enough for every speech;
these seconds are enough for most answers."""

LEARNED = 0.1
"""Weight of the newest window in the learned pace."""


class WindowPace:
    """Learns from windows how long a window takes now, relative to its time at load, when nothing else ran. The first window of a speech
    shows little of this, because at that time the machine also reads the question."""

    def __init__(self) -> None:
        self._slowness = 1.0  # seconds of a window now / its seconds alone at load

    def took(self, seconds: float, expected_s: float, window_count: int) -> None:
        """Learn from a window that took `seconds`. expected_s: seconds that it took alone at load. window_count: number of windows, this
        window included, that were computed in turn at that time."""
        self._slowness += LEARNED * (seconds / (expected_s * window_count) - self._slowness)

    def slowness(self, window_count: int) -> float:
        """How many times its seconds alone at load a window takes now. window_count: as in `took`."""
        return self._slowness * window_count


class Forecast:
    """Makes the forecasts of one model, and learns from all of its speeches. code_s: seconds of sound of a code. form: returns the form of
    a window; windows of equal form take equally long. seconds: form -> seconds that a window takes alone on this machine; windows of other
    forms are not learned from. `_computing`: number of windows in work."""

    def __init__(self, code_s: float, seconds: Mapping[Hashable, float], form: Callable[[Window], Hashable]) -> None:
        self._code_s, self._seconds, self._form = code_s, seconds, form
        self._pace, self._computing = WindowPace(), 0

    @contextmanager
    def watching(self, window: Window, *, learning: bool) -> Iterator[None]:
        """Use it around the computation of a window. learning: whether to learn from this window, because it is like most others."""
        begin_s, self._computing = time.monotonic(), self._computing + 1
        window_count = self._computing
        try:
            yield
        finally:
            self._computing -= 1
        if learning and (expected_s := self._seconds.get(self._form(window))) is not None:
            self._pace.took(time.monotonic() - begin_s, expected_s, window_count)

    def prebuffer_s(self, schedule: Schedule, arrivals: Arrivals, begin_s: float, end_s: float) -> float:
        """Seconds that a player should wait before it plays the first sound of a speech. arrivals: of the speech's codes. begin_s, end_s:
        when its first window began and when it was done, in seconds of any clock."""
        slowness, seconds, form = self._pace.slowness(max(self._computing, 1)), self._seconds, self._form
        return prebuffer_s(schedule, self._code_s, arrivals.interval_s, lambda window: slowness * seconds[form(window)], begin_s, end_s)


class Arrivals:
    """Records when the codes of a speech came."""

    def __init__(self) -> None:
        self._first_at = self._last_at = 0.0
        self._first_count = self._count = 0  # number of codes that came first together, and of all codes

    def came(self, now_s: float, codes: int) -> None:
        """Record that this many codes came at the time `now_s`, in seconds of any clock."""
        if codes:
            if not self._count:
                self._first_at, self._first_count = now_s, codes
            self._last_at, self._count = now_s, self._count + codes

    @property
    def interval_s(self) -> float:
        """Mean seconds from one code to the next; 0 while all codes came at once."""
        return (self._last_at - self._first_at) / max(self._count - self._first_count, 1)


def prebuffer_s(
    schedule: Schedule, code_s: float, interval_s: float, decode_s: Callable[[Window], float], first_codes_at: float, heard_at: float
) -> float:
    """Seconds to wait with the first sound, so that each later sound is ready when the sound before it has been played: the largest delay
    of any later window's sound if the first sound were played at once.

    code_s: seconds of sound of a code. interval_s: seconds from one code to the next as they come. decode_s: returns the seconds that a
    window takes. first_codes_at: when all codes of the first window had come. heard_at: when its sound was ready."""
    first = schedule.window(0, 1 << 62, has_ended=False)
    if first is None:
        return 0.0
    done, due, wait = heard_at, heard_at + (first.end - first.begin) * code_s, 0.0
    for number in count(1):
        window = schedule.window(number, 1 << 62, has_ended=False)
        if window is None or window.end * code_s >= HORIZON_S:
            break
        arrival_s = first_codes_at + (window.past - first.past) * interval_s
        done = max(arrival_s, done) + decode_s(window)
        wait = max(wait, done - due)
        due += (window.end - window.begin) * code_s
    return wait
