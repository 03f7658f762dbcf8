"""Who steps next: within its budget, in groups, and nobody waits longer than the bound, whatever else comes and goes."""

from __future__ import annotations

from collections.abc import Hashable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, MultipleResults, RuleBasedStateMachine, consumes, invariant, multiple, rule

from omnistage.models.common.steps import Policy, TooCostly


def admitted(costs: dict[str, int], budget: int = 100, step_budget: int = 10) -> Policy[str]:
    policy = Policy[str](budget, step_budget)
    for job, cost in costs.items():
        policy.submit(job, cost)
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


class Machine(RuleBasedStateMachine):
    """Jobs come, step, stop and start to read, change their group and go; a model of the policy knows how long each has waited."""

    jobs: Bundle[int] = Bundle("jobs")

    def __init__(self) -> None:
        super().__init__()
        self.policy = Policy[int](budget=40, step_budget=12)
        self.costs: dict[int, int] = {}
        self.keys: dict[int, Hashable] = {}
        self.order: list[int] = []
        self.waited: dict[int, int] = {}
        self.most: dict[int, int] = {}
        self.blocked: set[int] = set()
        self.numbers = iter(range(1 << 30))

    @rule(target=jobs, asked=st.lists(st.tuples(st.integers(1, 9) | st.integers(1, 40), st.sampled_from("aab")), min_size=1, max_size=6))
    def submit(self, asked: list[tuple[int, str]]) -> MultipleResults[int]:
        numbers = [next(self.numbers) for _ in asked]
        for job, (cost, key) in zip(numbers, asked, strict=True):
            self.policy.submit(job, cost)
            self.costs[job], self.keys[job] = cost, key
            self.order.append(job)
        return multiple(*numbers)

    @rule(job=consumes(jobs))
    def withdraw(self, job: int) -> None:
        self.policy.withdraw(job)
        for known in (self.costs, self.keys, self.waited, self.most):
            known.pop(job, None)
        self.blocked.discard(job)
        if job in self.order:
            self.order.remove(job)

    @rule()
    def admit(self) -> None:
        """In order, and as many as there is room for."""
        fitting = self.policy.admit()
        assert fitting == self.order[: len(fitting)]
        del self.order[: len(fitting)]
        self.waited.update(dict.fromkeys(fitting, 0))
        self.most.update(dict.fromkeys(fitting, 0))
        held = sum(self.costs[job] for job in self.waited)
        assert held <= 40
        assert not self.order or held + self.costs[self.order[0]] > 40

    @rule(job=jobs, key=st.sampled_from("ab"))
    def change_group(self, job: int, key: str) -> None:
        self.keys[job] = key

    @rule(job=jobs)
    def stop_or_go_on(self, job: int) -> None:
        """Who has been unable to step has waited for nobody."""
        self.blocked ^= {job}
        if job in self.waited:
            self.waited[job] = self.most[job] = 0

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            able = [job for job in self.waited if job not in self.blocked]
            chosen = self.policy.choose(self.keys.__getitem__, lambda job: job not in self.blocked)
            assert set(chosen) <= set(able) and bool(chosen) == bool(able)
            assert len({self.keys[job] for job in chosen}) <= 1
            assert len(chosen) == 1 or sum(self.costs[job] for job in chosen) <= 12
            for job in able:
                self.most[job] = max(self.most[job], len(self.waited))
                self.waited[job] = 0 if job in chosen else self.waited[job] + 1
                if job in chosen:
                    self.most[job] = 0

    @invariant()
    def nobody_waits_longer_than_the_bound(self) -> None:
        """Fewer steps than there were jobs admitted, at most, while it waited."""
        for job, waited in self.waited.items():
            assert waited < max(self.most[job], 1), f"job {job} has waited {waited} steps among {self.most[job]}"


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
