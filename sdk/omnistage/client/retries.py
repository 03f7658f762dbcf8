"""Decides how often, and after what pauses, a call is retried that a server refused with a delay."""

from __future__ import annotations

import random

from omnistage.client.allowed import plain
from omnistage.client.errors import BadRequestError, UnavailableError

MAX_RETRIES = 2
"""Retries of a call by default."""

GROWTH, MOST_GROWTH = 3.0, 9.0
"""The factor by which the pause grows from one attempt to the next, and its largest value: a process that restarts may take longer than
the server said."""

JITTER = 0.25
"""A pause is longer by a random part of itself, of at most this share, because many clients are refused at the same moment. It is never
shorter than the server said."""


_draw = random.SystemRandom()
"""Not Python's shared generator: the client must not change the numbers that a program draws, and forked processes must draw others."""


class Retries:
    """Counts the retries of one call. most: how often the call may be retried. made: how often it has been retried."""

    def __init__(self, max_retries: int) -> None:
        self.most = max_retries
        self.made = 0

    def pause_s(self, said_s: float) -> float:
        """The next pause, in seconds, at least `said_s`, the delay that the server gave."""
        return said_s * min(GROWTH**self.made, MOST_GROWTH) * _draw.uniform(1.0, 1.0 + JITTER)

    def count(self, refusal: UnavailableError, pause_s: float) -> str:
        """Count one more retry, after this refusal and this pause; returns a line about it for the log."""
        self.made += 1
        return f"{refusal.message}; asking again in {pause_s:.1f} s ({self.made} of {self.most})"


def checked_retries(value: object) -> int:
    """Returns `value` if it is a whole number from 0. Raises BadRequestError otherwise."""
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise BadRequestError.of("max_retries", f"is {value!r}; give a whole number from 0, which is never")
    return value
