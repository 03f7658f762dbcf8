"""How often, and after what pauses, a call is retried that a server refused with a delay."""

from __future__ import annotations

import random

from omnistage.client.allowed import plain
from omnistage.client.errors import BadRequestError, UnavailableError

MAX_RETRIES = 2
"""The default."""

GROWTH, MOST_GROWTH = 3.0, 9.0
"""Growth of the pause from one attempt to the next, and the most growth in all: a process that restarts may take longer than the server
said."""

JITTER = 0.25
"""A pause is longer by a random part up to this share, drawn anew each time, because many clients are refused at the same moment. It is
never shorter than the server said."""


_draw = random.SystemRandom()
"""Not the generator that programs seed: a server must not change the numbers that they draw, and forked processes must not draw alike."""


class Retries:
    """The retries of one call. most: how often the call is retried."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.made = 0

    def pause_s(self, said_s: float) -> float:
        """The next pause, in seconds. said_s: the server's delay."""
        return said_s * min(GROWTH**self.made, MOST_GROWTH) * _draw.uniform(1.0, 1.0 + JITTER)

    def count(self, refusal: UnavailableError, pause_s: float) -> str:
        """Count one more retry, for this refusal, after this pause; returns a line about it."""
        self.made += 1
        return f"{refusal.message}; asking again in {pause_s:.1f} s ({self.made} of {self.most})"


def checked_retries(value: object) -> int:
    """`value`, if it is a number of times. Raises BadRequestError."""
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise BadRequestError.of("max_retries", f"is {value!r}; give a whole number from 0, which is never")
    return value
