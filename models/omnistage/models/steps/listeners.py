"""An order of steps for listeners: the job that is due first steps next, and others of its key step with it.

Sound is due when its listener has heard the sound before it: at once for a listener who has heard nothing yet. So a new speaker overtakes
those that are ahead, and nobody is passed by for ever. The results of a job do not depend on where or with whom it steps.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from omnistage.models.steps.interface import CanStep, Key

J = TypeVar("J", bound=Hashable)


class Listeners(Generic[J]):
    """Implements `Order`. A job is submitted with the time at which it is due, on the clock of the event loop."""

    def __init__(self, max_jobs: Callable[[Hashable, int], int], is_halved: Callable[[Hashable], bool]) -> None:
        """max_jobs: how many jobs may step together, by their key and the number of jobs that could; jobs are divided among idle workers
        first. is_halved: whether an idle worker is to take half of a step of this key."""
        self._most, self._is_halved = max_jobs, is_halved
        self._due: dict[J, float] = {}

    @property
    def waiting(self) -> int:
        """How many jobs are not done."""
        return len(self._due)

    def submit(self, job: J, due_s: float) -> None:
        self._due[job] = due_s

    def withdraw(self, job: J) -> None:
        self._due.pop(job, None)

    def choose(self, key: Key[J], can_step: CanStep[J], idle: int) -> Sequence[J]:
        """The job that is due first, and jobs of its key that step with it; none if none can step."""
        free = sorted(filter(can_step, self._due), key=self._due.__getitem__)
        if not free or (lead := key(free[0])) is None:
            return free[:1]
        alike = [job for job in free if key(job) == lead]
        return alike[: max(self._most(lead, min(-(-len(free) // idle), len(alike))), 1)]

    def stepped(self, jobs: Sequence[J]) -> None:
        """Due times do not depend on steps."""

    def is_halved(self, key: Hashable | None) -> bool:
        return key is not None and self._is_halved(key)
