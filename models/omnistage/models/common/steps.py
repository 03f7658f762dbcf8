"""Who steps next: many drawings share the steps of one model. The policy alone: no model, no thread, no torch.

    submit --> waiting --admit--> admitted --choose--> a step together --> ... --> withdraw

Waiting jobs are admitted as far as their costs together fit the budget: what is admitted has its place in memory until it ends. Clients
take turns, and of one client who came first is next. Each step is led by a client that has not led for longest, with its job that has not
stepped for longest. Others of the group of that job step with it as far as the budget of a step allows: clients take turns here too, and of
one client the longest waiting is next.

**The bounds.** Among jobs of c clients, n of them its own client's, an admitted job that can step takes part in one of any c * n steps in a
row: whoever leads goes behind its client, who comes anew is behind it too, so its client leads one of any c steps; and each of them is led
by it or by one of its client that then goes behind it. This holds whatever groups there are, and however many jobs others have. While jobs
of c clients wait, the n-th of a client is in the same way among the next c * n that are admitted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class TooCostly(ValueError):
    """A job that does not fit even alone."""


class Policy(Generic[T]):
    """Knows jobs by their cost alone, in a unit of the model: such as latent tokens, those of guidance counted as well."""

    def __init__(self, budget: int, step_budget: int, most: int = 0) -> None:
        """budget: cost of all admitted jobs together. step_budget: of those that step together; one alone may cost more. most: of them,
        whatever they cost; 0: as many as fit."""
        self._budget = budget
        self._step_budget = step_budget
        self._most = most
        self._clients: dict[T, str] = {}
        self._waiting: dict[str, dict[T, int]] = {}  # By client: whose turn it is first.
        self._admitted: dict[T, int] = {}  # In the order in which they stepped, who has not for longest first.
        self._leading: dict[str, None] = {}  # Clients of those, who has not led for longest first.
        self._cost = 0

    @property
    def waiting(self) -> int:
        return len(self._clients) - len(self._admitted)

    @property
    def admitted(self) -> int:
        return len(self._admitted)

    def submit(self, job: T, cost: int, client: str = "") -> None:
        """Let it wait for admission. Raises TooCostly."""
        if cost > self._budget:
            raise TooCostly(f"it costs {cost}, and all together may cost {self._budget}")
        self._clients[job] = client
        self._waiting.setdefault(client, {})[job] = cost

    def withdraw(self, job: T) -> None:
        """It has ended, or is given up: at any time, also one that is not known any more."""
        client = self._clients.get(job)
        if client is None:
            return
        if job not in self._admitted:
            self._take(job, client)
            del self._clients[job]
            return
        # In this order: another thread that counts those who wait finds no fewer than none.
        self._cost -= self._admitted.pop(job)
        del self._clients[job]
        if not any(self._clients[other] == client for other in self._admitted):
            del self._leading[client]

    def admit(self) -> list[T]:
        """Those that there is room for now. The first that does not fit keeps its turn: nobody overtakes it."""
        fitting = []
        while self._waiting:
            client, jobs = next(iter(self._waiting.items()))
            job, cost = next(iter(jobs.items()))
            if self._cost + cost > self._budget:
                break
            self._take(job, client)
            if jobs:
                self._waiting[client] = self._waiting.pop(client)
            self._cost += cost
            self._admitted[job] = cost
            self._leading.setdefault(client)
            fitting.append(job)
        return fitting

    def _take(self, job: T, client: str) -> None:
        """Out of those that wait."""
        jobs = self._waiting[client]
        del jobs[job]
        if not jobs:
            del self._waiting[client]

    def choose(self, group_key: Callable[[T], Hashable], can_step: Callable[[T], bool] = lambda job: True) -> list[T]:
        """Those that take the next step together, its leader first; nobody where nobody can."""
        able = [job for job in self._admitted if can_step(job)]
        if not able:
            return []
        can_lead = {self._clients[job] for job in able}
        client = next(client for client in self._leading if client in can_lead)
        leader = next(job for job in able if self._clients[job] == client)
        key, left = group_key(leader), self._step_budget - self._admitted[leader]
        chosen = [leader]
        for job in self._in_turns([job for job in able if job != leader and group_key(job) == key]):
            if self._admitted[job] <= left and (not self._most or len(chosen) < self._most):
                left -= self._admitted[job]
                chosen.append(job)
        for job in chosen:
            self._admitted[job] = self._admitted.pop(job)
        del self._leading[client]
        self._leading[client] = None
        return chosen

    def _in_turns(self, jobs: list[T]) -> list[T]:
        """The first of every client, then the second, and so on."""
        turns: Counter[str] = Counter()
        ranked: list[tuple[int, T]] = []
        for job in jobs:
            turns[self._clients[job]] += 1
            ranked.append((turns[self._clients[job]], job))
        return [job for _, job in sorted(ranked, key=lambda rank: rank[0])]
