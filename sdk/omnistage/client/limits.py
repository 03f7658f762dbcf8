"""How long one call may take, with the error for a call that reaches this limit, and how often, and after what pauses, a call is retried
that a server refused with a delay."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from omnistage.client.errors import BadRequestError, DeadlineError, OmniError, UnavailableError, from_rpc_error
from omnistage.client.options import plain

EARLY_S = 0.5
"""Seconds. If a call is ended by a time limit, but earlier than this before our own limit, another time limit ended it."""

HINT_CUT_SHORT = "A proxy before the router has a time limit of its own: give more time there."


class Limit:
    """A time limit that begins when it is made. seconds: above 0."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._until = time.perf_counter() + seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside this block the time does not count."""
        begin_s = time.perf_counter()
        try:
            yield
        finally:
            self._until += time.perf_counter() - begin_s

    @property
    def spent_s(self) -> float:
        return self.seconds - (self._until - time.perf_counter())

    @property
    def left_s(self) -> float:
        """The seconds that are left. Raises DeadlineError when none are."""
        left_s = self._until - time.perf_counter()
        if left_s <= 0:
            raise self.passed()
        return left_s

    @property
    def is_over(self) -> bool:
        return time.perf_counter() >= self._until

    def ends_within(self, seconds: float) -> bool:
        """Whether the limit ends within this many seconds from now."""
        return time.perf_counter() + seconds >= self._until

    def passed(self, *sentences: str) -> DeadlineError:
        """The error of a call that is not complete when its time is over. sentences: further sentences."""
        message = "; ".join([f"the answer was not complete within {self.seconds:g} s", *sentences])
        return DeadlineError(message, reason="DEADLINE", code=grpc.StatusCode.DEADLINE_EXCEEDED)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """A context in which a failed call is raised as an exception of `errors`."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise self.explain(error) from error

    def explain(self, error: grpc.aio.AioRpcError) -> OmniError:
        """The exception for a failed call. gRPC does not say whose time limit ended a call; this compares the time with our own limit."""
        explained = from_rpc_error(error)
        if not isinstance(explained, DeadlineError) or explained.reason:
            return explained
        return self._cut_short(explained) if time.perf_counter() < self._until - EARLY_S else self.passed()

    def _cut_short(self, explained: DeadlineError) -> DeadlineError:
        """The error for a call that another time limit has ended. explained: the error from `from_rpc_error`."""
        message = f"the call was ended after {self.spent_s:.1f} s, before its own time limit of {self.seconds:g} s: {explained.message}"
        return DeadlineError(message, hint=HINT_CUT_SHORT, code=explained.code)


MAX_RETRIES = 2
"""Retries of a call by default."""

GROWTH, MAX_GROWTH = 3.0, 9.0
"""The factor by which the pause grows from one attempt to the next, and its largest value: a process that restarts may take longer than
the server said."""

JITTER = 0.25
"""A pause is longer by a random part of itself, of at most this share, because many clients are refused at the same moment. It is never
shorter than the server said."""


_draw = random.SystemRandom()
"""Not Python's shared generator: the client must not change the numbers that a program draws, and forked processes must draw others."""


class Retries:
    """Counts the retries of one call. max_retries: how often it may be retried. retry_count: how often it has been."""

    def __init__(self, max_retries: int) -> None:
        self.max_retries = max_retries
        self.retry_count = 0

    def pause_s(self, delay_s: float) -> float:
        """The next pause, in seconds. delay_s: the delay that the server gave; the pause is at least so long."""
        return delay_s * min(GROWTH**self.retry_count, MAX_GROWTH) * _draw.uniform(1.0, 1.0 + JITTER)

    def count(self, refusal: UnavailableError, pause_s: float) -> str:
        """Count one more retry, after this refusal and this pause; returns a line about it for the log."""
        self.retry_count += 1
        return f"{refusal.message}; asking again in {pause_s:.1f} s ({self.retry_count} of {self.max_retries})"


def checked_retries(value: object) -> int:
    """Returns `value` if it is a whole number from 0. Raises BadRequestError otherwise."""
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise BadRequestError.of("max_retries", f"is {value!r}; give a whole number from 0, which is never")
    return value
