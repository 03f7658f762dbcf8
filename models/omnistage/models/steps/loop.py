"""The loop of an engine of steps: whenever a worker is idle, the jobs that the order chooses step on it.

    submit --> order --choose--> step, on a worker --take--> shown --> ... --> done

A step keeps all of its jobs until it ends, because nobody can stop its thread. If a step of several jobs fails, each job takes the step
alone: one of them is the cause, and ends alone. If one worker has all jobs in one step, it goes on with them until a job comes or goes:
otherwise it would wait for the event loop after each step, and a GPU for both.

The loop needs a family (`Steps`), an order (`Order`) and workers (`StepWorker`)."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from omnistage.models.interface import Batches, Load

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


A = TypeVar("A")

MAX_AHEAD = 4
"""How many steps a worker may be ahead of the event loop before it waits for the loop."""


@dataclass(eq=False, slots=True)
class _Entry(Generic[T]):
    """A job in the loop. shown: called with what a step shows; returns whether the job goes on. over: done when the job ends. ready:
    whether the job may step."""

    shown: Callable[[T], bool]
    over: asyncio.Future[None]
    ready: bool = True


class _NoKey(Exception):
    """The key of `job` cannot be computed, because of `error`."""

    def __init__(self, job: Any, error: Exception) -> None:
        super().__init__()
        self.job, self.error = job, error


class Loop(Generic[J, A, T]):
    """All jobs of one model. Used from one event loop at a time."""

    def __init__(self, steps: Steps[J, T], order: Order[J, A], workers: Sequence[StepWorker], *, is_eager: bool = False) -> None:
        """order: chooses the jobs of each step. is_eager: whether a worker that has all jobs in one step may go on by itself."""
        self._steps, self._order, self._is_eager = steps, order, is_eager
        self._idle = list(reversed(workers))
        self._entries: dict[J, _Entry[T]] = {}
        self._stepping = set[J]()
        self._step_ended = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._woken: asyncio.AbstractEventLoop | None = None
        """The event loop that will look for steps soon."""
        self._may_go_on = False
        """Whether the worker may go on by itself; it reads this after each step."""
        self.steps = 0  # How many steps were taken.
        self.stepped = 0
        """The jobs of all steps, counted anew in each step."""

    @property
    def load(self) -> Load:
        return Load(queued=self._order.waiting, batches=Batches(self.steps, self.stepped))

    async def run(self, job: J, demand: A) -> None:
        """Return when the job is done. If cancelled, return when no step has the job. Raises the error of one of its steps."""
        over = self.submit(job, demand)
        try:
            await over
        finally:
            await self.withdraw(job)
            del over  # Its error refers to this frame: each would keep the other in memory.

    def submit(self, job: J, demand: A, shown: Callable[[T], bool] = lambda _: True) -> asyncio.Future[None]:
        """Returns a future that ends with the job. shown: called with what each of its steps shows; if it returns False, the job waits for
        `go_on`. The caller must withdraw the job. Raises TooCostly."""
        self._order.submit(job, demand)
        entry = self._entries[job] = _Entry(shown, asyncio.get_running_loop().create_future())
        self._interrupt()
        return entry.over

    def go_on(self, job: J) -> None:
        """Let the job step again."""
        self._entries[job].ready = True
        self._wake()

    async def withdraw(self, job: J) -> None:
        """Give up the job. Returns when no step has it, even if cancelled: its memory must not be freed while a thread uses it."""
        self._end(job)
        self._interrupt()
        cancelled: asyncio.CancelledError | None = None
        while job in self._stepping:
            try:
                await self._step_ended.wait()
            except asyncio.CancelledError as error:
                cancelled = error
        del self._entries[job]
        self._steps.give_up(job)
        if cancelled is not None:
            raise cancelled

    def _end(self, job: J, error: Exception | None = None) -> None:
        """End a job, with an error if there is one. Does nothing if the job has ended before."""
        self._order.withdraw(job)
        over = self._entries[job].over
        if over.done():
            return
        if error is None:
            over.set_result(None)
        else:
            over.set_exception(settable(error))

    def _interrupt(self) -> None:
        """A job came or went: stop the worker from going on by itself, and look for steps."""
        self._may_go_on = False
        self._wake()

    def _wake(self) -> None:
        """Look for steps soon, not now, so that jobs that come at the same moment share them."""
        loop = asyncio.get_running_loop()
        if self._woken is not loop:  # A loop that was woken before may have ended.
            self._woken = loop
            loop.call_soon(self._begin)

    def _begin(self) -> None:
        """Give every idle worker a step, if there is one. An error here ends all jobs, because no further step would come."""
        self._woken = None
        try:
            while self._idle and (group := self._choose()):
                self._start(group)
        except Exception as error:
            for job in tuple(self._entries):
                self._end(job, RuntimeError(f"the steps have ended: {error!r}"))

    def _choose(self) -> Sequence[J]:
        """The jobs of the next step. If the key of a job cannot be computed, this job ends, and no other."""
        while True:
            try:
                return self._order.choose(self._key, self._can_step, len(self._idle))
            except _NoKey as failed:
                self._end(failed.job, failed.error)

    def _key(self, job: J) -> Hashable | None:
        """The key of a job. Raises _NoKey, with the job, for any error."""
        try:
            return self._steps.key(job)
        except Exception as error:
            raise _NoKey(job, error) from error

    def _can_step(self, job: J) -> bool:
        entry = self._entries[job]
        return entry.ready and job not in self._stepping and not entry.over.done()

    def _start(self, group: Sequence[J]) -> None:
        """Start a step of these jobs on an idle worker; on two, if a second worker has no other jobs and the step can be halved."""
        workers = [self._idle.pop()]
        self._stepping.update(group)
        try:
            self._order.stepped(group)
            has_idle_worker = self._idle and not self._choose()
            if has_idle_worker and self._order.is_halved(self._steps.key(group[0])):
                workers.append(self._idle.pop())
        except Exception:
            self._release(group, workers)
            raise
        task = asyncio.create_task(self._run_step(group, workers))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_step(self, group: Sequence[J], workers: Sequence[StepWorker]) -> None:
        """Run one step. If something other than a job's error ends it, its jobs end."""
        try:
            await self._step_all(group, workers)
        except BaseException as error:
            for job in group:
                self._end(job, RuntimeError(f"the steps have ended: {error!r}"))
            if not isinstance(error, asyncio.CancelledError):
                raise
        finally:
            self._release(group, workers)
            self._wake()

    def _release(self, group: Sequence[J], workers: Sequence[StepWorker]) -> None:
        """Note that no step has these jobs and workers any more."""
        self._idle.extend(reversed(workers))
        self._stepping.difference_update(group)
        self._step_ended.set()
        self._step_ended = asyncio.Event()

    async def _step_all(self, group: Sequence[J], workers: Sequence[StepWorker]) -> None:
        """Step all jobs at once; if that fails, each job alone."""
        group = [job for job in group if not self._entries[job].over.done()]
        if not group:
            return
        try:
            await self._step(group, workers)
            return
        except Exception as error:
            if len(group) == 1:
                self._end(group[0], error)
                return
        for job in group:
            await self._step_all([job], workers)

    async def _step(self, group: Sequence[J], workers: Sequence[StepWorker]) -> None:
        """Run a step of these jobs on one or two workers; a worker that may go on runs several. Show the last; end finished jobs."""
        self._may_go_on = self._is_eager and len(group) == len(self._entries)
        aside = workers[1].aside if len(workers) > 1 else None
        work = partial(self._work, group, aside, asyncio.get_running_loop())
        self._show(group, await workers[0].run(work))
        for job in group:
            self._end_if_done(job)

    def _end_if_done(self, job: J) -> None:
        """End the job if it needs no further step."""
        try:
            is_done = self._steps.is_done(job)
        except Exception as error:  # The error belongs to the task that waits for this job, whose step has ended.
            self._end(job, error)
        else:
            if is_done:
                self._end(job)

    def _work(self, group: Sequence[J], aside: Aside | None, loop: asyncio.AbstractEventLoop) -> Sequence[T | Exception]:
        """Runs on the worker: takes one or more steps. Returns for each job what its last step shows, or the error that ends it; the event
        loop shows earlier steps meanwhile. aside: as in Steps.step."""
        shown_before = self.steps
        for earlier_steps in itertools.count():
            self._steps.step(group, aside)
            results = [self._take(job) for job in group]
            unshown_steps = earlier_steps - (self.steps - shown_before)  # of this call; the event loop has still to show them
            waits = not self._may_go_on or unshown_steps >= MAX_AHEAD
            if waits or any(isinstance(result, Exception) for result in results) or not self._can_go_on(group):
                break
            loop.call_soon_threadsafe(self._show_early, group, results)
        return results

    def _can_go_on(self, group: Sequence[J]) -> bool:
        """Whether all jobs together can take another step like the last one."""
        try:
            return not any(map(self._steps.is_done, group)) and len(set(map(self._steps.key, group))) == 1
        except Exception:  # The error of one job: it is raised once more where it ends that job alone.
            return False

    def _take(self, job: J) -> T | Exception:
        """The result of the computed step of a job, or its error."""
        try:
            return self._steps.take(job)
        except Exception as error:  # The error belongs to the task that waits for this job.
            return error

    def _show_early(self, group: Sequence[J], results: Sequence[T | Exception]) -> None:
        """Runs on the event loop while the worker computes the next step of the same jobs: shows the step before, and stops the worker from
        going on if a job must wait. results: what the step shows for each job, or its error."""
        self._show(group, results)
        self._order.stepped([job for job in group if not self._entries[job].over.done()])
        if not all(self._entries[job].ready for job in group):
            self._may_go_on = False

    def _show(self, group: Sequence[J], results: Sequence[T | Exception]) -> None:
        """Count a step, and show it to its jobs. results: what it shows for each job, or the error that ends the job."""
        self.steps += 1
        self.stepped += len(group)
        for job, result in zip(group, results, strict=True):
            entry = self._entries[job]
            if entry.over.done():
                continue
            if isinstance(result, Exception):
                self._end(job, result)
            else:
                entry.ready = entry.shown(result) and entry.ready
