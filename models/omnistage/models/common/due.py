"""Steps of many jobs on one thread: the job that is due first steps next, and with it all others of its shape.

Sound is due when its listener has heard what came before: at once for one who has heard nothing yet. So a new speaker overtakes those who
are ahead, and nobody is passed by for ever. The order changes no job.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

from omnistage.models.common.worker import Worker


class Job(Protocol):
    @property
    def done(self) -> bool:
        """It needs no further step."""


J = TypeVar("J", bound=Job)


@dataclass(eq=False, slots=True)
class _Waiting(Generic[J]):
    job: J
    due: float
    over: asyncio.Future[None]


def chosen(jobs: Sequence[tuple[float, Hashable]], most: Callable[[Hashable, int], int]) -> list[int]:
    """Places of those that step now, that which is due first of all and others of its shape. jobs: when each is due, and its shape; one at
    least. most: how many of a shape may step together, of so many that could."""
    order = sorted(range(len(jobs)), key=lambda place: jobs[place][0])
    shape = jobs[order[0]][1]
    alike = [place for place in order if jobs[place][1] == shape]
    return alike[: most(shape, len(alike))]


class DueQueue(Generic[J]):
    """step: of jobs of one shape, on the worker's thread; where it raises it has changed none of them. shape: may be another after a step.
    most: see `chosen`. Used from one event loop."""

    def __init__(
        self,
        worker: Worker,
        step: Callable[[Sequence[J]], None],
        shape: Callable[[J], Hashable],
        most: Callable[[Hashable, int], int],
    ) -> None:
        self._worker, self._step, self._shape, self._most = worker, step, shape, most
        self._jobs: list[_Waiting[J]] = []
        self._running: asyncio.Task[None] | None = None
        self._stepped = asyncio.Event()
        self._stepping: Sequence[_Waiting[J]] = ()

    @property
    def waiting(self) -> int:
        """Jobs that are not done."""
        return len(self._jobs)

    async def run(self, job: J, due: float) -> None:
        """Return when the job is done. due: by the clock of the event loop. Cancelled, it returns when no step has the job in it. Raises
        what a step of it raises."""
        waiting = _Waiting(job, due, asyncio.get_running_loop().create_future())
        self._jobs.append(waiting)
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        try:
            await waiting.over
        finally:
            if waiting in self._jobs:
                self._jobs.remove(waiting)
            await self._not_stepping(waiting)
            del waiting  # An error of it leads to this frame.

    async def _run(self) -> None:
        try:
            while self._jobs:
                places = chosen([(each.due, self._shape(each.job)) for each in self._jobs], self._most)
                await self._together([self._jobs[place] for place in places])
        finally:
            self._running = None
            for each in self._jobs:
                each.over.cancel()

    async def _together(self, group: Sequence[_Waiting[J]]) -> None:
        """One step. Where it fails each is asked alone: one of them is the cause."""
        self._stepping, failed = group, None
        try:
            await self._worker.run(partial(self._step, [each.job for each in group]))
        except Exception as error:
            failed = error
        finally:
            self._stepping = ()
            self._stepped.set()
            self._stepped = asyncio.Event()
        if failed is not None and len(group) > 1:
            for each in group:
                if not each.over.done():
                    await self._together([each])
            return
        for each in group:
            if failed is None and not each.job.done:
                continue
            self._jobs.remove(each)
            if each.over.done():
                continue
            if failed is None:
                each.over.set_result(None)
            else:
                each.over.set_exception(failed)
        del failed

    async def _not_stepping(self, waiting: _Waiting[J]) -> None:
        """Return when no step has it in it, whatever is cancelled meanwhile: what it works on would be freed under the thread."""
        cancelled = False
        while waiting in self._stepping:
            try:
                await self._stepped.wait()
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError
