"""The pace at which a machine makes speech. It decides how long a player should wait before it plays, so that it never runs out of sound,
and whether a second thread should take half of a step now; and it gives the number of speakers that the machine serves in real time. No
torch.

A second thread may make a step slower: on a busy machine each half waits for a core, and because of Python's lock two threads with little
work mostly wait for each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from omnistage.models.interface import Activity
from omnistage.models.speech.schedule import ALL_CODES, Schedule, Window

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

    def record(self, now_s: float, codes: int) -> None:
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
    first = schedule.window(0, ALL_CODES, has_ended=False)
    if first is None:
        return 0.0
    # The times at which a window's sound is ready, and is due if the first sound is played at once; and the largest delay so far.
    ready_at, due_at, wait_s = heard_at, heard_at + (first.end - first.begin) * code_s, 0.0
    for number in count(1):
        window = schedule.window(number, ALL_CODES, has_ended=False)
        if window is None or window.end * code_s >= HORIZON_S:
            break
        codes_at = first_codes_at + (window.past - first.past) * interval_s
        ready_at = max(codes_at, ready_at) + decode_s(window)
        wait_s = max(wait_s, ready_at - due_at)
        due_at += (window.end - window.begin) * code_s
    return wait_s


WORTH = 0.9
"""A second thread is used if a step with it takes at most this part of its time on one thread."""

FIRST_PAUSE, LONGEST_PAUSE = 8, 64
"""After a step on two threads was too slow, FIRST_PAUSE steps of its shape run on one thread. The number doubles, up to LONGEST_PAUSE, each
time that the next attempt is too slow as well."""


class Halving:
    """Decides for each shape whether a second thread takes half of a step. step_seconds: shape -> seconds of its step on one thread, for
    the shapes that two threads may share. `_pauses`: shape -> length of its next pause, in steps."""

    def __init__(self, step_seconds: Mapping[Hashable, float]) -> None:
        self._step_seconds = step_seconds
        self._pauses = dict.fromkeys(step_seconds, FIRST_PAUSE)
        self._pause_steps = dict.fromkeys(step_seconds, 0)
        """Shape -> number of its next steps that must run on one thread."""

    def worth(self, shape: Hashable) -> bool:
        """Whether to use a second thread. Call it once before each step for which a second thread is free."""
        if shape not in self._step_seconds:
            return False
        if self._pause_steps[shape]:
            self._pause_steps[shape] -= 1
            return False
        return True

    def took(self, shape: Hashable, seconds: float) -> None:
        """Learn from a step on two threads, which took `seconds` by the clock. It does nothing for a shape that is not in
        `step_seconds`."""
        if shape not in self._step_seconds:
            return
        if seconds <= WORTH * self._step_seconds[shape]:
            self._pauses[shape] = FIRST_PAUSE
            return
        self._pause_steps[shape] = self._pauses[shape]
        self._pauses[shape] = min(2 * self._pauses[shape], LONGEST_PAUSE)


def computing_s(thread: Activity | None, device: str) -> float:
    """Seconds on a clock that runs only while a thread computes, so that other work on the same CPU does not count. thread: None: the
    calling thread. With a GPU the clock always runs, because the CPU waits for the GPU."""
    if device != "cpu":
        return time.perf_counter()
    if thread is None:
        return time.thread_time()
    assert thread.thread_id is not None
    return int(Path(f"/proc/self/task/{thread.thread_id}/schedstat").read_text().split()[0]) / 1e9


def speakers_text(speakers: float) -> str:
    """The text of the setting `real_time_speakers`."""
    return f"{speakers:.1f}, measured, with nothing else on this machine"
