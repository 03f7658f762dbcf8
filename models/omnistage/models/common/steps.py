"""Who steps next: many drawings share the steps of one model. The policy alone: no model, no thread, no torch.

    submit --> waiting --admit--> admitted --choose--> a step together --> ... --> withdraw

Waiting jobs are admitted first come, first served, as far as their costs together fit the budget: what is admitted has its place in memory
until it ends. Each step is led by the job that has not stepped for longest; others of its group step with it, the longest waiting first, as
far as the budget of a step allows.

**The bound.** Of n admitted jobs each that can step takes part in one of any n steps in a row: whoever steps goes behind it, whoever is
admitted comes behind it, so every step it does not take has one job less before it. This holds whatever groups there are: a lonely one is
not kept waiting by a full one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class TooCostly(ValueError):
    """A job that does not fit even alone."""


class Policy(Generic[T]):
    """Knows jobs by their cost alone, in a unit of the model: such as latent tokens, those of guidance counted as well."""

    def __init__(self, budget: int, step_budget: int) -> None:
        """budget: cost of all admitted jobs together. step_budget: of those that step together; one alone may cost more."""
        self._budget = budget
        self._step_budget = step_budget
        self._waiting: dict[T, int] = {}
        self._admitted: dict[T, int] = {}  # In the order in which they stepped, who has not for longest first.
        self._cost = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def admitted(self) -> int:
        return len(self._admitted)

    def submit(self, job: T, cost: int) -> None:
        """Let it wait for admission. Raises TooCostly."""
        if cost > self._budget:
            raise TooCostly(f"it costs {cost}, and all together may cost {self._budget}")
        self._waiting[job] = cost

    def withdraw(self, job: T) -> None:
        """It has ended, or is given up: at any time, also one that is not known any more."""
        self._waiting.pop(job, None)
        self._cost -= self._admitted.pop(job, 0)

    def admit(self) -> list[T]:
        """Those that there is room for now. The first that does not fit keeps its turn: nobody overtakes it."""
        fitting = []
        for job, cost in self._waiting.items():
            if self._cost + cost > self._budget:
                break
            self._cost += cost
            fitting.append(job)
        for job in fitting:
            self._admitted[job] = self._waiting.pop(job)
        return fitting

    def choose(self, group_key: Callable[[T], Hashable], can_step: Callable[[T], bool] = lambda job: True) -> list[T]:
        """Those that take the next step together, its leader first; nobody where nobody can."""
        able = [job for job in self._admitted if can_step(job)]
        if not able:
            return []
        leader, *others = able
        key, left = group_key(leader), self._step_budget - self._admitted[leader]
        chosen = [leader]
        for job in others:
            if self._admitted[job] <= left and group_key(job) == key:
                left -= self._admitted[job]
                chosen.append(job)
        for job in chosen:
            self._admitted[job] = self._admitted.pop(job)
        return chosen
