"""The orders of steps: which jobs step next. `Fair` is for drawings, and is fair to the clients who share the steps of one model;
`Listeners` is for sound, which its listeners must have in time.

**Drawings.**

    submit --> waiting --admit--> admitted --choose, stepped--> a step further --> ... --> withdraw

Waiting jobs are admitted as far as their costs together fit the budget: an admitted job has its place in memory until it ends. Besides
the budget there is a reserve for one job of each client that has none admitted, if the job costs no more than a step. So a large job
holds up a small one for a step, and not until the large one ends. The job that is due first leads a step, and others of its group step
with it, in the order in which they are due, as far as the budget of a step allows.

**When a job is due.** The order is weighted fair queueing (Demers, Keshav and Shenker 1989; Parekh and Gallager 1993) with jobs as
packets: a job is due at the time when it would end if clients shared the model evenly, each with one job after another. The work of a
job is its cost times its steps, and virtual time is work for each client: a step that costs w while c clients have jobs takes w / c of
it. So

    due = max(now, when the job before it of its client is due) + its work

Jobs end one after another, not all at the end as they would if they took turns. A short job of another client goes before long ones; a
client with many jobs waits for itself.

**The bound.** A job with work w, whose client still has work w' before it, is due w + w' after it came. Later jobs step before it only
if they are due before it: work of at most w + w' of each other client, however many jobs they have. Time goes on with every step. While
the job waits for room, jobs in the reserve step too. If a job takes more steps than it said, such as decoded pieces, each further step
makes it due later, as if that step were another job of its client.

**Sound** is due when its listener has heard the sound before it: at once for a listener who has heard nothing yet. So a new speaker
overtakes those that are ahead, and nobody is passed by for ever. The results of a job do not depend on where or with whom it steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from omnistage.models.steps.loop import CanStep, Key

J = TypeVar("J", bound=Hashable)

RESERVE = 4
"""The reserve is the budget divided by this, or the cost of a step if that is more."""


class TooCostly(ValueError):
    """A job does not fit, even without other jobs."""


class JobWork(NamedTuple):
    """The declared work of a job. cost: cost of a step, in a unit of the model, such as latent tokens, guidance included. steps:
    approximate number of steps. client: the job's client."""

    cost: int
    steps: int
    client: str = ""


@dataclass(slots=True)
class _Queued:
    """A job. cost, client: as in JobWork. due: virtual time. work_left: work that is not done yet. reserved: its cost is part of the
    reserve."""

    cost: int
    client: str
    due: float
    work_left: float
    reserved: bool = False


class Fair(Generic[J]):
    """Implements `Order`. It knows only the cost of jobs."""

    def __init__(self, budget: int, step_budget: int, max_jobs: int = 0) -> None:
        """budget: limit of the cost of all admitted jobs together. The reserve comes on top: a quarter of the budget, or step_budget if
        that is more. step_budget: limit of the cost of jobs that step together; a single job may cost more. max_jobs: limit of their
        number; 0: no limit."""
        self._budget = budget
        self._reserve = max(budget // RESERVE, step_budget)
        self._step_budget = step_budget
        self._max_jobs = max_jobs
        self._waiting: dict[J, _Queued] = {}
        self._admitted: dict[J, _Queued] = {}
        self._virtual_time = 0.0
        self._last_due: dict[str, float] = {}
        """When the last job of each client is due. It is kept after that job, so that nobody gets more by asking again and again."""

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def admitted(self) -> int:
        return len(self._admitted)

    def submit(self, job: J, work: JobWork) -> None:
        """Let a job wait for admission. Raises TooCostly if a step of it costs more than the budget."""
        cost, steps, client = work
        if cost > self._budget:
            raise TooCostly(f"it costs {cost}, and all together may cost {self._budget}")
        # A client whose last job is due in the past needs no entry: its next job counts from now.
        self._last_due = {name: due for name, due in self._last_due.items() if due > self._virtual_time}
        due = self._last_due[client] = self._last_due.get(client, self._virtual_time) + cost * steps
        self._waiting[job] = _Queued(cost, client, due, cost * steps)

    def withdraw(self, job: J) -> None:
        """Remove a job that has ended or was given up; later jobs of its client become due earlier. The job may be unknown."""
        entry = self._waiting.pop(job, None) or self._admitted.pop(job, None)
        if entry is None or entry.work_left <= 0:
            return
        for later in (*self._waiting.values(), *self._admitted.values()):
            if later.client == entry.client and later.due > entry.due:
                later.due -= entry.work_left
        if entry.client in self._last_due:
            self._last_due[entry.client] -= entry.work_left

    def admit(self) -> list[J]:
        """Admit the waiting jobs that fit, and return them. Later jobs do not take the room that the first job that does not fit needs."""
        admitted = self._admitted.values()
        room = self._budget - sum(entry.cost for entry in admitted if not entry.reserved)
        reserve = self._reserve - sum(entry.cost for entry in admitted if entry.reserved)
        clients, jobs = {entry.client for entry in admitted}, []
        for job in sorted(self._waiting, key=lambda job: self._waiting[job].due):
            entry = self._waiting[job]
            if entry.cost <= room:
                room -= entry.cost
            elif entry.client not in clients and entry.cost <= min(reserve, self._step_budget):
                entry.reserved = True
                reserve -= entry.cost
            else:
                room = -1  # No later job is admitted from the budget: this one needs the room.
                continue
            clients.add(entry.client)
            self._admitted[job] = self._waiting.pop(job)
            jobs.append(job)
        return jobs

    def choose(self, key: Key[J], can_step: CanStep[J], idle: int = 1) -> list[J]:
        """The jobs of the next step; none if none can step. The job that is due first leads. A job that must take a step alone before it
        can join others takes it as soon as it would fit into a step with the leader. idle: workers among which the jobs are divided."""
        self.admit()
        able = sorted((job for job in self._admitted if can_step(job)), key=lambda job: self._admitted[job].due)
        share = -(-len(able) // idle)  # rounded up
        return self._together(able, key, share) if able else []

    def is_halved(self, key: Hashable | None) -> bool:
        """Never: an idle worker is for the next drawing."""
        return False

    def stepped(self, jobs: Sequence[J]) -> None:
        """Count a step of these admitted jobs."""
        clients = {entry.client for queue in (self._waiting, self._admitted) for entry in queue.values()}
        for job in jobs:
            entry = self._admitted[job]
            entry.work_left -= entry.cost
            self._virtual_time += entry.cost / len(clients)
            if entry.work_left < 0:
                entry.due = max(entry.due, self._virtual_time) + entry.cost
                self._last_due[entry.client] = max(self._last_due.get(entry.client, 0.0), entry.due)

    def _together(self, able: list[J], key_of: Key[J], share: int) -> list[J]:
        """The jobs that step together with the first. able: jobs that can step, by due time. share: limit of their number."""
        max_jobs = min(self._max_jobs or share, share)
        leader, *others = able
        key, budget = key_of(leader), self._step_budget - self._admitted[leader].cost
        group = [leader]
        if key is None:
            return group
        for job in others:
            cost = self._admitted[job].cost
            if cost > budget or len(group) == max_jobs:
                continue
            job_key = key_of(job)
            if job_key is None:  # It must take a step alone before it can join the leader.
                return [job]
            if job_key == key:
                budget -= cost
                group.append(job)
        return group


class Listeners(Generic[J]):
    """Implements `Order`. A job is submitted with the time at which it is due, on the clock of the event loop."""

    def __init__(self, max_jobs: Callable[[Hashable, int], int], is_halved: Callable[[Hashable], bool]) -> None:
        """max_jobs: how many jobs may step together, by their key and the number of jobs that could; jobs are divided among idle workers
        first. is_halved: whether an idle worker is to take half of a step of this key."""
        self._max_jobs, self._is_halved = max_jobs, is_halved
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
        able = sorted(filter(can_step, self._due), key=self._due.__getitem__)
        leader_key = key(able[0]) if able else None
        if leader_key is None:
            return able[:1]
        alike = [job for job in able if key(job) == leader_key]
        share = -(-len(able) // idle)  # rounded up
        count = self._max_jobs(leader_key, min(share, len(alike)))
        return alike[: max(count, 1)]

    def stepped(self, jobs: Sequence[J]) -> None:
        """Due times do not depend on steps."""

    def is_halved(self, key: Hashable | None) -> bool:
        return key is not None and self._is_halved(key)
