"""Steps of many jobs on few threads: the job that is due first steps next, and with it others of its shape.

Sound is due when its listener has heard what came before: at once for one who has heard nothing yet. So a new speaker overtakes those who
are ahead, and nobody is passed by for ever. Who steps where and with whom changes no job.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from omnistage.models.common.together import Stepping, step_all
from omnistage.models.common.worker import Aside, Worker
from omnistage.models.interface import Batches, Load


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
    """step: of jobs of one shape, on the thread of a worker, the first of which gets most to do; where it raises it has changed none of
    them. It is given a second thread for half of the work, if there is one with nothing to do and `halves` says that the shape is worth it.
    shape: may be another after a step. most: see `chosen`; but jobs are spread over idle workers before they are put together. Used from
    one event loop.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        step: Callable[[Sequence[J], Aside | None], None],
        shape: Callable[[J], Hashable],
        most: Callable[[Hashable, int], int],
        halves: Callable[[Hashable], bool],
    ) -> None:
        self._step, self._shape, self._most, self._halves = step, shape, most, halves
        self._idle = list(reversed(workers))
        self._jobs: list[_Waiting[J]] = []
        self._steps: set[asyncio.Task[None]] = set()
        self._stepping = Stepping[_Waiting[J]]()
        self._steps_done = self._stepped = 0

    @property
    def load(self) -> Load:
        return Load(queued=self.waiting, batches=Batches(self._steps_done, self._stepped))

    @property
    def waiting(self) -> int:
        """Jobs that are not done."""
        return len(self._jobs)

    async def run(self, job: J, due: float) -> None:
        """Return when the job is done. due: by the clock of the event loop. Cancelled, it returns when no step has the job in it. Raises
        what a step of it raises."""
        waiting = _Waiting(job, due, asyncio.get_running_loop().create_future())
        self._jobs.append(waiting)
        self._begin()
        try:
            await waiting.over
        finally:
            if waiting in self._jobs:
                self._jobs.remove(waiting)
            await self._stepping.left(waiting)
            del waiting  # An error of it leads to this frame.

    def _begin(self) -> None:
        """Give every worker that has nothing to do a step, if there is one."""
        while self._idle and (free := [each for each in self._jobs if each not in self._stepping]):
            share = -(-len(free) // len(self._idle))
            shapes = [(each.due, self._shape(each.job)) for each in free]
            places = chosen(shapes, partial(self._spread, share))
            group = [free[place] for place in places]
            workers = [self._idle.pop()]
            if len(group) == len(free) and self._idle and self._halves(shapes[places[0]][1]):
                workers.append(self._idle.pop())
            self._stepping.begin(group)
            task = asyncio.create_task(self._together(group, workers))
            self._steps.add(task)
            task.add_done_callback(self._steps.discard)

    def _spread(self, share: int, shape: Hashable, there: int) -> int:
        return self._most(shape, min(share, there))

    async def _together(self, group: Sequence[_Waiting[J]], workers: Sequence[Worker]) -> None:
        """One step. What ends it, but an error of the step, ends its jobs."""
        try:
            await step_all(group, partial(self._one, workers), _fail)
        except BaseException:
            for each in group:
                each.over.cancel()
            raise
        finally:
            for each in group:
                if each.over.done() and each in self._jobs:
                    self._jobs.remove(each)
            self._idle.extend(reversed(workers))
            self._stepping.end(group)
        self._begin()

    async def _one(self, workers: Sequence[Worker], group: Sequence[_Waiting[J]]) -> None:
        group = [each for each in group if not each.over.done()]
        if not group:
            return
        worker, *others = workers
        await worker.run(partial(self._step, [each.job for each in group], others[0].aside if others else None))
        self._steps_done += 1
        self._stepped += len(group)
        for each in group:
            if each.job.done and not each.over.done():
                each.over.set_result(None)


def _fail(waiting: _Waiting[Any], error: Exception) -> None:
    if not waiting.over.done():
        waiting.over.set_exception(error)
