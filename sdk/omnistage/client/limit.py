"""The time limit of one call, and the error for a call that reaches it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from omnistage.client.errors import DeadlineError, OmniError, from_rpc_error

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
