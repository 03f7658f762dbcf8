"""How often a call is asked again of which the server said when it may be, and after how long."""

from __future__ import annotations

import random

from omnistage.client.allowed import plain
from omnistage.client.errors import BadRequestError, UnavailableError

MAX_RETRIES = 2
"""Where nobody says otherwise."""

GROWTH, MOST_GROWTH = 3.0, 9.0
"""Of the pause, from one attempt to the next, and in all: a process that is started again may take longer than the server said."""

JITTER = 0.25
"""A pause is longer by up to so much of it, drawn anew each time: many clients are refused in the same moment. It is never shorter than
the server said."""


_draw = random.SystemRandom()
"""Not the generator that programs seed: what they draw does not depend on a server, and processes that were forked do not draw alike."""


class Retries:
    """Of one call. most: how often it is asked again."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.made = 0

    def pause_s(self, said_s: float) -> float:
        """The next pause, seconds. said_s: by the server."""
        return said_s * min(GROWTH**self.made, MOST_GROWTH) * _draw.uniform(1.0, 1.0 + JITTER)

    def count(self, refusal: UnavailableError, pause_s: float) -> str:
        """One more is made, for this refusal, after this pause; what to tell of it."""
        self.made += 1
        return f"{refusal.message}; asking again in {pause_s:.1f} s ({self.made} of {self.most})"


def checked_retries(value: object) -> int:
    """`value`, if it is a number of times. Raises BadRequestError."""
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise BadRequestError.of("max_retries", f"is {value!r}; give a whole number from 0, which is never")
    return value
