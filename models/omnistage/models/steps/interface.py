"""What the loop asks of a family, of an order and of a worker."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar

T = TypeVar("T")
J = TypeVar("J", bound=Hashable)
Job = TypeVar("Job", contravariant=True)
Asked = TypeVar("Asked", contravariant=True)
Shown = TypeVar("Shown", covariant=True)

Key = Callable[[J], Hashable | None]
CanStep = Callable[[J], bool]

Aside = Callable[[Callable[[], None]], "Future[None]"]
"""Runs a call on another thread; the caller goes on."""


class Steps(Protocol[Job, Shown]):
    """What a family offers. A job is what it knows of one request, hashed by identity. `step` and `take` run on a worker, all else where no
    step has the job in it."""

    def key(self, job: Job) -> Hashable | None:
        """Jobs of equal keys can step together. Asked before each step: it may be another each time. None: alone, and before it can be with
        others."""

    def step(self, jobs: Sequence[Job], aside: Aside | None) -> None:
        """Compute one step of all of them. aside: a second thread for half of the work. All or nothing: where it raises, it has changed
        none of them, and each is asked alone again."""

    def take(self, job: Job) -> Shown:
        """Take the step that was computed; returns what there is to show. Where it raises, its own job ends and no other."""

    def is_done(self, job: Job) -> bool:
        """It needs no further step."""

    def give_up(self, job: Job) -> None:
        """It has ended, or nobody wants it any more: free what it holds. Takes no time."""


class Order(Protocol[J, Asked]):
    """Who steps next. Knows neither models nor threads."""

    @property
    def waiting(self) -> int:
        """Jobs that wait for a place."""

    def submit(self, job: J, asked: Asked) -> None:
        """One more. Raises TooCostly for one that never fits."""

    def withdraw(self, job: J) -> None:
        """It has ended, or is given up: at any time, also one that is not known any more."""

    def choose(self, key: Key[J], can_step: CanStep[J], idle: int) -> Sequence[J]:
        """Those that take the next step together, nobody where nobody can. idle: workers that have nothing to do, one at least."""

    def stepped(self, jobs: Sequence[J]) -> None:
        """Count a step of these."""

    def is_halved(self, key: Hashable | None) -> bool:
        """Whether a step of jobs of this key is worth a second thread that has nothing to do."""


class Worker(Protocol):
    """Where steps are computed."""

    def run(self, call: Callable[[], T], /) -> Awaitable[T]:
        """What the call returns. Cancelled, it returns when the call is not running any more."""

    @property
    def aside(self) -> Aside: ...


def settable(error: BaseException) -> BaseException:
    """An error as a future takes it: it refuses a StopIteration, and whoever waits for it would wait for ever."""
    if not isinstance(error, StopIteration):
        return error
    told = RuntimeError(f"an iterator was asked for more than it has: {error!r}")
    told.__cause__ = error
    return told
