"""An order of steps for listeners: the job that is due first steps next, and with it others of its key.

Sound is due when its listener has heard what came before: at once for one who has heard nothing yet. So a new speaker overtakes those who
are ahead, and nobody is passed by for ever. Who steps where and with whom changes no job.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from omnistage.models.steps.interface import CanStep, Key

J = TypeVar("J", bound=Hashable)


class Listeners(Generic[J]):
    """Implements `Order`. A job is submitted with the time when it is due, by the clock of the event loop."""

    def __init__(self, most: Callable[[Hashable, int], int], is_halved: Callable[[Hashable], bool]) -> None:
        """most: how many of a key may step together, of so many that could; but jobs are spread over idle workers before they are put
        together. is_halved: whether a step of a key is worth a second thread."""
        self._most, self._is_halved = most, is_halved
        self._due: dict[J, float] = {}

    @property
    def waiting(self) -> int:
        """Jobs that are not done."""
        return len(self._due)

    def submit(self, job: J, asked: float) -> None:
        self._due[job] = asked

    def withdraw(self, job: J) -> None:
        self._due.pop(job, None)

    def choose(self, key: Key[J], can_step: CanStep[J], idle: int) -> Sequence[J]:
        free = sorted(filter(can_step, self._due), key=self._due.__getitem__)
        if not free or (lead := key(free[0])) is None:
            return free[:1]
        alike = [job for job in free if key(job) == lead]
        return alike[: max(self._most(lead, min(-(-len(free) // idle), len(alike))), 1)]

    def stepped(self, jobs: Sequence[J]) -> None:
        """Who is due when does not depend on it."""

    def is_halved(self, key: Hashable | None) -> bool:
        return key is not None and self._is_halved(key)
