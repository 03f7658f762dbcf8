"""The choice of the jobs that step next: within the budget, in groups, the most due first, and no job waits longer than the bound, whatever
else comes and goes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from fractions import Fraction
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, MultipleResults, RuleBasedStateMachine, consumes, invariant, multiple, rule

from omnistage.models.steps.orders import Fair, JobWork, TooCostly

T = TypeVar("T", bound=Hashable)


def admitted(costs: dict[str, int], budget: int = 100, step_budget: int = 10, clients: str = "", steps: int = 1) -> Fair[str]:
    """clients: a letter for each job; those without one are of nobody in particular."""
    fair = Fair[str](budget, step_budget)
    for place, (job, cost) in enumerate(costs.items()):
        fair.submit(job, JobWork(cost, steps, clients[place : place + 1]))
    fair.admit()
    return fair


def step(fair: Fair[T], group_key: Callable[[T], Hashable | None], can_step: Callable[[T], bool] = lambda job: True) -> list[T]:
    """Those that are chosen, and counted."""
    chosen = fair.choose(group_key, can_step)
    fair.stepped(chosen)
    return chosen


def run(fair: Fair[str], left: dict[str, int]) -> list[list[str]]:
    """All steps until each has taken so many; who steps together has the same first letter."""
    steps = []
    while left:
        fair.admit()
        steps.append(step(fair, lambda job: job[0]))
        for job in steps[-1]:
            left[job] -= 1
            if not left[job]:
                fair.withdraw(job)
                del left[job]
    return steps


def test_who_came_first_is_over_first_and_others_of_its_group_step_with_it_as_far_as_the_budget_goes() -> None:
    fair = admitted({"a1": 4, "b1": 4, "a2": 4, "a3": 4}, steps=2)
    assert run(fair, dict.fromkeys(("a1", "b1", "a2", "a3"), 2)) == [["a1", "a2"]] * 2 + [["b1"]] * 2 + [["a3"]] * 2


def test_one_that_costs_more_than_a_step_may_steps_alone() -> None:
    fair = admitted({"a1": 30, "a2": 1})
    assert run(fair, {"a1": 2, "a2": 1}) == [["a1"], ["a1"], ["a2"]]


def test_no_more_step_together_than_may() -> None:
    fair = Fair[str](100, 100, max_jobs=2)
    for job in ("a1", "a2", "a3"):
        fair.submit(job, JobWork(1, 1))
    assert run(fair, {"a1": 1, "a2": 1, "a3": 1}) == [["a1", "a2"], ["a3"]]


def test_who_does_not_fit_yet_keeps_its_turn() -> None:
    fair = Fair[str](10, 10)
    for job, cost in (("big", 6), ("bigger", 7), ("small", 1)):
        fair.submit(job, JobWork(cost, 1))
    assert fair.admit() == ["big"] and fair.admit() == []
    fair.withdraw("big")
    assert fair.admit() == ["bigger", "small"]
    with pytest.raises(TooCostly, match="costs 11"):
        fair.submit("huge", JobWork(11, 1))
    fair.withdraw("huge")
    fair.withdraw("bigger")
    assert (fair.admitted, fair.waiting) == (1, 0)


def test_what_is_large_holds_nobody_small_up_until_it_ends() -> None:
    fair = Fair[str](budget=40, step_budget=10)
    for job, cost, client in (("large", 36, "a"), ("small", 10, "a"), ("larger", 30, "b"), ("small too", 10, "c"), ("again", 10, "c")):
        fair.submit(job, JobWork(cost, 5, client))
        fair.admit()
    assert (fair.admitted, fair.waiting) == (2, 3), "the second client's is too large, and who has one admitted waits for room"
    assert [step(fair, lambda job: job) for _ in range(5)] == [["small too"]] * 5
    fair.withdraw("small too")
    fair.withdraw("large")
    assert fair.admit() == ["small", "again"], "who is due first, as far as there is room"


def test_one_that_takes_more_steps_than_it_said_lets_others_come_between() -> None:
    fair = admitted({"a1": 4, "b1": 4}, clients="ab")
    assert run(fair, {"a1": 5, "b1": 2}) == [["a1"], ["a1"], ["b1"], ["b1"], ["a1"], ["a1"], ["a1"]]


def test_one_that_cannot_step_holds_nobody_up_and_has_the_next_turn() -> None:
    fair = admitted({"a": 1, "b": 1, "c": 1})
    ready = {"b", "c"}
    assert [step(fair, lambda job: job, ready.__contains__) for _ in range(2)] == [["b"], ["b"]]
    ready.add("a")
    assert step(fair, lambda job: job, ready.__contains__) == ["a"]
    assert step(fair, lambda job: job, lambda job: False) == []


def test_one_of_another_client_is_over_before_all_but_the_first_of_one_with_many() -> None:
    fair = admitted({**{f"{letter}1": 4 for letter in "abcdef"}, "x1": 4}, clients="gggggg" + "m", steps=3)
    order = [step[0] for step in run(fair, {f"{letter}1": 3 for letter in "abcdefx"})]
    assert order == [job for job in ("a1", "x1", "b1", "c1", "d1", "e1", "f1") for _ in range(3)]


def test_a_short_one_of_another_client_goes_first_but_not_for_ever() -> None:
    """When the other client has had as much work as the long one asks for, that is due."""
    fair = Fair[str](100, 10)
    fair.submit("long", JobWork(10, 10, "patient"))
    fair.admit()
    order = list[str]()
    for number in range(30):
        fair.submit(f"short {number}", JobWork(10, 1, "hasty"))
        fair.admit()
        order += step(fair, lambda job: job)
        if order[-1] != "long":
            fair.withdraw(order[-1])
        elif order.count("long") == 10:
            fair.withdraw("long")
    assert order == [f"short {n}" for n in range(9)] + ["long"] * 10 + [f"short {n}" for n in range(9, 20)]


def test_who_asks_again_and_again_gets_no_more_than_who_asks_at_once() -> None:
    """Each of them is due when a job of this work, begun with the first, would be."""
    fair = Fair[str](100, 10)
    fair.submit("other", JobWork(10, 4, "b"))
    led = 0
    for number in range(20):
        fair.submit(f"mine {number}", JobWork(10, 1, "a"))
        fair.admit()
        chosen = step(fair, lambda job: job)
        if chosen == ["other"]:
            break
        led += 1
        fair.withdraw(chosen[0])
    assert led <= 4


def test_what_was_not_done_of_a_job_is_not_held_against_its_client() -> None:
    fair = Fair[str](100, 10)
    fair.submit("given up", JobWork(10, 1000, "a"))
    fair.submit("behind it", JobWork(10, 1, "a"))
    fair.withdraw("given up")
    fair.submit("again", JobWork(10, 2, "a"))
    fair.submit("other", JobWork(10, 4, "b"))
    assert run(fair, {"behind it": 1, "again": 2, "other": 4}) == [["behind it"]] + [["again"]] * 2 + [["other"]] * 4


def test_who_must_be_alone_first_is_so_as_soon_as_it_could_join() -> None:
    fair = admitted({"a1": 4, "a2": 4, "a3": 4}, step_budget=8, steps=9)
    keys: dict[str, str | None] = {"a1": "a", "a2": None, "a3": None}
    assert step(fair, keys.__getitem__) == ["a2"]
    keys["a2"] = "a"
    assert step(fair, keys.__getitem__) == ["a1", "a2"], "for a3 there is no room"
    fair.withdraw("a1")
    assert step(fair, keys.__getitem__) == ["a3"]
    keys["a3"] = "a"
    assert step(fair, keys.__getitem__) == ["a2", "a3"]
    keys["a2"] = None
    assert step(fair, keys.__getitem__) == ["a2"], "who leads is alone too"


asked_jobs = st.tuples(
    st.integers(1, 9) | st.integers(1, 40), st.integers(1, 9), st.sampled_from("aab") | st.none(), st.sampled_from("gggmx")
)
"""Cost, steps, group, client."""


class FairMachine(RuleBasedStateMachine):
    """Jobs come, step, stop and start to read, change their group and go; a model of the fair in exact numbers knows when each is due."""

    jobs: Bundle[int] = Bundle("jobs")

    def __init__(self) -> None:
        super().__init__()
        self.fair = Fair[int](budget=40, step_budget=12)
        self.costs: dict[int, int] = {}
        self.left: dict[int, int] = {}
        """Steps."""
        self.keys: dict[int, Hashable | None] = {}
        self.clients: dict[int, str] = {}
        self.due: dict[int, Fraction] = {}
        self.allowed: dict[int, Fraction] = {}
        """Work of each client that may come later and still lead before it."""
        self.passed: dict[int, dict[str, int]] = {}
        """Work that came later and led before it while it could have, by client."""
        self.waiting: set[int] = set()
        self.admitted: set[int] = set()
        self.reserved: set[int] = set()
        self.blocked: set[int] = set()
        self.now = Fraction(0)
        self.last: dict[str, Fraction] = {}
        self.numbers = iter(range(1 << 30))

    @rule(target=jobs, asked=st.lists(asked_jobs, min_size=1, max_size=6))
    def submit(self, asked: list[tuple[int, int, str | None, str]]) -> MultipleResults[int]:
        numbers = [next(self.numbers) for _ in asked]
        for job, (cost, steps, key, client) in zip(numbers, asked, strict=True):
            self.fair.submit(job, JobWork(cost, steps, client))
            self.costs[job], self.left[job], self.keys[job], self.clients[job] = cost, steps, key, client
            self.due[job] = self.last[client] = max(self.now, self.last.get(client, self.now)) + cost * steps
            self.allowed[job], self.passed[job] = self.due[job] - self.now, {}
            self.waiting.add(job)
        return multiple(*numbers)

    @rule(job=consumes(jobs))
    def withdraw(self, job: int) -> None:
        self.fair.withdraw(job)
        if job in self.left:
            self.forget(job)

    def forget(self, job: int) -> None:
        client, undone = self.clients[job], self.costs[job] * self.left[job]
        self.last[client] -= undone
        for other in self.due:
            if self.clients[other] == client and other > job:
                self.due[other] -= undone
        for known in (self.costs, self.left, self.keys, self.clients, self.due, self.allowed, self.passed):
            del known[job]
        for group in (self.waiting, self.admitted, self.reserved, self.blocked):
            group.discard(job)

    @rule()
    def admit(self) -> None:
        """In the order in which they are due, as many as there is room for; and one that is small, of who has none, in the reserve."""
        for job in self.fair.admit():
            held = sum(self.costs[other] for other in self.admitted - self.reserved)
            if held + self.costs[job] > 40 or self.due[job] > min(self.due[other] for other in self.waiting):
                assert self.clients[job] not in {self.clients[other] for other in self.admitted} and self.costs[job] <= 12
                self.reserved.add(job)
            self.waiting.remove(job)
            self.admitted.add(job)
        held = sum(self.costs[job] for job in self.admitted - self.reserved)
        assert held <= 40 and sum(self.costs[job] for job in self.reserved) <= 12
        first = min(self.waiting, key=self.due.__getitem__, default=None)
        assert first is None or any(self.due[other] == self.due[first] and held + self.costs[other] > 40 for other in self.waiting), (
            f"there is room for {first}"
        )
        assert self.fair.waiting == len(self.waiting) and self.fair.admitted == len(self.admitted)

    @rule(job=jobs, key=st.sampled_from("ab"))
    def change_group(self, job: int, key: str) -> None:
        if job in self.left:
            self.keys[job] = key

    @rule(job=jobs)
    def stop_or_go_on(self, job: int) -> None:
        if job in self.left:
            self.blocked ^= {job}

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.admit()
            able = self.admitted - self.blocked
            chosen = step(self.fair, self.keys.__getitem__, lambda job: job not in self.blocked)
            assert set(chosen) <= able and bool(chosen) == bool(able)
            if chosen:
                self.look_at(chosen, able)
                clients = set(self.clients.values())
                self.now += Fraction(sum(self.costs[job] for job in chosen), len(clients))
            for job in chosen:
                self.keys[job] = self.keys[job] or "a"
                self.left[job] -= 1
                if not self.left[job]:
                    self.fair.withdraw(job)
                    self.forget(job)

    def look_at(self, chosen: list[int], able: set[int]) -> None:
        """Whom it is right that they step, and whom they pass."""
        assert len({self.keys[job] for job in chosen}) == 1
        assert len(chosen) == 1 or (sum(self.costs[job] for job in chosen) <= 12 and self.keys[chosen[0]] is not None)
        if self.due[chosen[0]] > min(self.due[job] for job in able):
            assert self.keys[chosen[0]] is None, "only to be with others after that"
            return
        # No job in the reserve passes one that waits for room: that room would not be its own.
        for job in (able if chosen[0] in self.reserved else able | self.waiting) - set(chosen):
            if chosen[0] > job and job not in self.blocked:
                passed = self.passed[job]
                passed[self.clients[chosen[0]]] = passed.get(self.clients[chosen[0]], 0) + self.costs[chosen[0]]

    @invariant()
    def nobody_waits_longer_than_the_bound(self) -> None:
        for job, passed in self.passed.items():
            assert self.clients[job] not in passed or not passed[self.clients[job]], "its own client's come one after another"
            assert all(work <= self.allowed[job] for work in passed.values()), (
                f"{passed} led before job {job} for which {self.allowed[job]} may"
            )


TestFair = FairMachine.TestCase


@given(st.lists(st.tuples(st.integers(1, 20), st.sampled_from("abc"), st.integers(1, 9)), min_size=1, max_size=20))
def test_everybody_comes_to_an_end(asked: list[tuple[int, str, int]]) -> None:
    """Waiting ones too: so many steps each, all within the sum of them."""
    fair = Fair[int](budget=40, step_budget=12)
    left = {}
    for job, (cost, client, steps) in enumerate(asked):
        fair.submit(job, JobWork(cost, steps, client))
        left[job] = steps
    for _ in range(sum(left.values())):
        fair.admit()
        for job in step(fair, lambda job: asked[job][1]):
            left[job] -= 1
            if not left[job]:
                fair.withdraw(job)
    assert not any(left.values())
