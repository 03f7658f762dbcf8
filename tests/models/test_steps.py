"""Who steps next: within its budget, in groups, and nobody waits longer than the bound, whatever else comes and goes."""

from __future__ import annotations

from collections.abc import Hashable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, MultipleResults, RuleBasedStateMachine, consumes, invariant, multiple, rule

from omnistage.models.common.steps import Policy, TooCostly


def admitted(costs: dict[str, int], budget: int = 100, step_budget: int = 10, clients: str = "") -> Policy[str]:
    """clients: a letter for each job; those without one are of nobody in particular."""
    policy = Policy[str](budget, step_budget)
    for place, (job, cost) in enumerate(costs.items()):
        policy.submit(job, cost, clients[place : place + 1])
    policy.admit()
    return policy


def test_a_group_steps_together_as_far_as_the_budget_goes_and_in_turns() -> None:
    policy = admitted({"a1": 4, "b1": 4, "a2": 4, "a3": 4})
    steps = [policy.choose(lambda job: job[0]) for _ in range(5)]
    assert steps == [["a1", "a2"], ["b1"], ["a3", "a1"], ["a2", "a3"], ["b1"]]


def test_one_that_costs_more_than_a_step_may_steps_alone() -> None:
    policy = admitted({"a1": 30, "a2": 1})
    assert [policy.choose(lambda job: "a") for _ in range(3)] == [["a1"], ["a2"], ["a1"]]


def test_who_does_not_fit_yet_keeps_its_turn() -> None:
    policy = Policy[str](10, 10)
    for job, cost in (("big", 6), ("bigger", 7), ("small", 1)):
        policy.submit(job, cost)
    assert policy.admit() == ["big"] and policy.admit() == []
    policy.withdraw("big")
    assert policy.admit() == ["bigger", "small"]
    with pytest.raises(TooCostly, match="costs 11"):
        policy.submit("huge", 11)
    policy.withdraw("huge")
    policy.withdraw("bigger")
    assert (policy.admitted, policy.waiting) == (1, 0)


def test_one_that_cannot_step_holds_nobody_up_and_has_the_next_turn() -> None:
    policy = admitted({"a": 1, "b": 1, "c": 1})
    ready = {"b", "c"}
    assert [policy.choose(lambda job: job, ready.__contains__) for _ in range(2)] == [["b"], ["c"]]
    ready.add("a")
    assert policy.choose(lambda job: job, ready.__contains__) == ["a"]
    assert policy.choose(lambda job: job, lambda job: False) == []


def test_a_client_with_one_job_steps_as_often_as_one_with_many() -> None:
    policy = admitted({**{f"a{index}": 4 for index in range(6)}, "b": 4}, clients="gggggg" + "m")
    steps = [policy.choose(lambda job: job[0]) for _ in range(6)]
    assert steps == [["a0", "a1"], ["b"], ["a2", "a3"], ["b"], ["a4", "a5"], ["b"]]


def test_clients_share_what_a_step_has_left() -> None:
    policy = admitted({**{f"a{index}": 4 for index in range(6)}, "ab": 4}, clients="gggggg" + "m", step_budget=12)
    steps = [policy.choose(lambda job: job[0]) for _ in range(3)]
    assert steps == [["a0", "ab", "a1"], ["ab", "a2", "a3"], ["a4", "a5", "ab"]]


def test_clients_are_admitted_in_turns_and_one_that_comes_later_overtakes_nobodys_turn() -> None:
    policy = Policy[str](10, 10)
    for index in range(4):
        policy.submit(f"a{index}", 4, "a")
    assert policy.admit() == ["a0", "a1"]
    policy.submit("b0", 4, "b")
    policy.submit("b1", 4, "b")
    for job, fitting in (("a0", ["a2"]), ("a1", ["b0"]), ("a2", ["a3"]), ("b0", ["b1"])):
        policy.withdraw(job)
        assert policy.admit() == fitting
    policy.withdraw("b1")
    policy.submit("b2", 9, "b")
    policy.withdraw("b2")
    assert (policy.admitted, policy.waiting) == (1, 0)


asked_jobs = st.tuples(st.integers(1, 9) | st.integers(1, 40), st.sampled_from("aab"), st.sampled_from("gggmx"))
"""Cost, group, client."""


class Machine(RuleBasedStateMachine):
    """Jobs come, step, stop and start to read, change their group and go; a model of the policy knows how long each has waited."""

    jobs: Bundle[int] = Bundle("jobs")

    def __init__(self) -> None:
        super().__init__()
        self.policy = Policy[int](budget=40, step_budget=12)
        self.costs: dict[int, int] = {}
        self.keys: dict[int, Hashable] = {}
        self.clients: dict[int, str] = {}
        self.order: list[int] = []
        self.turns: list[str] = []
        """Clients of those that wait, whose turn it is first."""
        self.waited: dict[int, int] = {}
        self.most: dict[int, tuple[int, int]] = {}
        """Clients that had jobs, and jobs that its own client had, at most while it waited."""
        self.passed: dict[int, int] = {}
        """How many of each that waits were admitted before it."""
        self.most_waiting: dict[int, tuple[int, int]] = {}
        """As `most`: clients, and jobs of its own up to itself."""
        self.blocked: set[int] = set()
        self.numbers = iter(range(1 << 30))

    @rule(target=jobs, asked=st.lists(asked_jobs, min_size=1, max_size=6))
    def submit(self, asked: list[tuple[int, str, str]]) -> MultipleResults[int]:
        numbers = [next(self.numbers) for _ in asked]
        for job, (cost, key, client) in zip(numbers, asked, strict=True):
            self.policy.submit(job, cost, client)
            self.costs[job], self.keys[job], self.clients[job] = cost, key, client
            self.order.append(job)
            self.turns += [client] if client not in self.turns else []
            self.passed[job], self.most_waiting[job] = 0, (0, 0)
        self.look_at_who_waits()
        return multiple(*numbers)

    def look_at_who_waits(self) -> None:
        clients = len({self.clients[job] for job in self.order})
        for place, job in enumerate(self.order):
            own = sum(self.clients[other] == self.clients[job] for other in self.order[: place + 1])
            self.most_waiting[job] = (max(self.most_waiting[job][0], clients), max(self.most_waiting[job][1], own))

    @property
    def next_to_admit(self) -> int | None:
        return next((job for job in self.order if self.clients[job] == self.turns[0]), None)

    def forget_waiting(self, job: int) -> None:
        self.order.remove(job)
        self.turns = [client for client in self.turns if any(self.clients[other] == client for other in self.order)]

    @rule(job=consumes(jobs))
    def withdraw(self, job: int) -> None:
        self.policy.withdraw(job)
        if job in self.order:
            self.forget_waiting(job)
        for known in (self.costs, self.keys, self.clients, self.waited, self.most, self.passed, self.most_waiting):
            known.pop(job, None)
        self.blocked.discard(job)

    @rule()
    def admit(self) -> None:
        """Those of one client in order, others within the bound, and as many as there is room for."""
        for job in self.policy.admit():
            assert job == self.next_to_admit
            self.turns.append(self.turns.pop(0))
            self.forget_waiting(job)
            for other in self.order:
                self.passed[other] += 1
            clients, own = self.most_waiting[job]
            assert self.passed[job] < clients * own
            self.waited[job], self.most[job] = 0, (0, 0)
        held = sum(self.costs[job] for job in self.waited)
        assert held <= 40
        assert self.next_to_admit is None or held + self.costs[self.next_to_admit] > 40
        assert self.policy.waiting == len(self.order) and self.policy.admitted == len(self.waited)

    @rule(job=jobs, key=st.sampled_from("ab"))
    def change_group(self, job: int, key: str) -> None:
        self.keys[job] = key

    @rule(job=jobs)
    def stop_or_go_on(self, job: int) -> None:
        """Who has been unable to step has waited for nobody."""
        self.blocked ^= {job}
        if job in self.waited:
            self.waited[job], self.most[job] = 0, (0, 0)

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            able = [job for job in self.waited if job not in self.blocked]
            chosen = self.policy.choose(self.keys.__getitem__, lambda job: job not in self.blocked)
            assert set(chosen) <= set(able) and bool(chosen) == bool(able)
            assert len({self.keys[job] for job in chosen}) <= 1
            assert len(chosen) == 1 or sum(self.costs[job] for job in chosen) <= 12
            clients = len({self.clients[job] for job in self.waited})
            for job in able:
                own = sum(self.clients[other] == self.clients[job] for other in self.waited)
                self.most[job] = (max(self.most[job][0], clients), max(self.most[job][1], own))
                self.waited[job] = 0 if job in chosen else self.waited[job] + 1
                if job in chosen:
                    self.most[job] = (0, 0)

    @invariant()
    def nobody_waits_longer_than_the_bound(self) -> None:
        """Fewer steps than there were clients times jobs of its own."""
        for job, waited in self.waited.items():
            clients, own = self.most[job]
            assert waited < max(clients * own, 1), f"job {job} has waited {waited} steps among {self.most[job]}"


TestPolicy = Machine.TestCase


@given(st.lists(st.tuples(st.integers(1, 20), st.sampled_from("abc"), st.integers(1, 9)), min_size=1, max_size=20))
def test_everybody_comes_to_an_end(asked: list[tuple[int, str, int]]) -> None:
    """Waiting ones too: so many steps each, all within the sum of them."""
    policy = Policy[int](budget=40, step_budget=12)
    left = {}
    for job, (cost, _, steps) in enumerate(asked):
        policy.submit(job, cost)
        left[job] = steps
    for _ in range(sum(left.values())):
        policy.admit()
        for job in policy.choose(lambda job: asked[job][1]):
            left[job] -= 1
            if not left[job]:
                policy.withdraw(job)
    assert not any(left.values())
