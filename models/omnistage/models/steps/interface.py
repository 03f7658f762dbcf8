"""Interfaces that the loop needs from a family, an order and a worker."""

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
    """The steps of a family. A job is the state of one request. `step` and `take` run on a worker, the others while no step has the job."""

    def key(self, job: Job) -> Hashable | None:
        """Jobs of equal keys can step together; a job whose key is None steps alone. The key may change before each step."""

    def step(self, jobs: Sequence[Job], aside: Aside | None) -> None:
        """Compute a step of all jobs. aside: a second thread for half the work, or None. An error changes no job; each then steps alone."""

    def take(self, job: Job) -> Shown:
        """Take the computed step; returns what there is to show. If it raises, it ends its own job and no other."""

    def is_done(self, job: Job) -> bool:
        """Whether the job needs no further step."""

    def give_up(self, job: Job) -> None:
        """Free what the job holds: it has ended, or nobody wants it any more. Must be quick."""


class Order(Protocol[J, Asked]):
    """Decides which jobs step next. Knows neither models nor threads."""

    @property
    def waiting(self) -> int:
        """How many jobs wait for admission."""

    def submit(self, job: J, demand: Asked) -> None:
        """Add a job. demand: its work, or when it is due, as the order needs it. Raises TooCostly for a job that never fits."""

    def withdraw(self, job: J) -> None:
        """Remove a job that has ended or was given up. Call it at any time, even for a job that was removed before."""

    def choose(self, key: Key[J], can_step: CanStep[J], idle: int) -> Sequence[J]:
        """The jobs that take the next step together; empty if none can step. idle: number of idle workers, at least one."""

    def stepped(self, jobs: Sequence[J]) -> None:
        """Count a step of these jobs."""

    def is_halved(self, key: Hashable | None) -> bool:
        """Whether an idle worker is to take half of a step of jobs of this key."""


class StepWorker(Protocol):
    """Computes steps."""

    def run(self, call: Callable[[], T], /) -> Awaitable[T]:
        """Returns the result of the call. If cancelled, it returns when the call is not running any more."""

    @property
    def aside(self) -> Aside: ...


def settable(error: BaseException) -> BaseException:
    """The error; for StopIteration a RuntimeError. A future refuses StopIteration, so a task that awaits it would wait for ever."""
    if not isinstance(error, StopIteration):
        return error
    substitute = RuntimeError(f"an iterator was asked for more than it has: {error!r}")
    substitute.__cause__ = error
    return substitute
