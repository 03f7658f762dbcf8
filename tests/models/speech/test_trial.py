"""The facts that a Code2Wav finds out about itself, with nets whose answers are known."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence

import pytest
import torch

from omnistage.models.interface import Profile
from omnistage.models.speech import code2wav as trial_module
from omnistage.models.speech.code2wav import SIZES, Trial, try_windows
from omnistage.models.speech.schedule import Schedule, Window
from omnistage.models.steps.loop import Aside
from omnistage.models.worker import Worker

Job = tuple[str, Window, int]


class Sums:
    """Windows of two stages: `read` has the same bits in any company, `sing` has other ones where more than `most` are together."""

    halves = True

    def __init__(self, most: int) -> None:
        self._most = most
        self.device, self.code_s = torch.device("cpu"), 0.02
        self.stages: Mapping[str, int] = {"read": 3, "sing": 1}

    def form(self, window: Window) -> Hashable:
        return window.end - window.begin, window.context

    def random_job(self, stage: str, window: Window, seed: int) -> Job:
        return stage, window, seed

    def shape(self, job: Job) -> Hashable:
        stage, window, _ = job
        return stage, self.form(window)

    def step(self, jobs: Sequence[Job], aside: Aside | None) -> list[torch.Tensor]:
        if aside is not None:
            aside(lambda: None).result()
        wrong = jobs[0][0] == "sing" and len(jobs) > self._most
        return [torch.tensor([window.begin, seed, int(wrong)]) for _, window, seed in jobs]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy this machine is, no net is taken for a slow one."""
    monkeypatch.setattr(trial_module, "SLOW_SECONDS", math.inf)
    monkeypatch.setattr(trial_module, "TRIAL_SECONDS", math.inf)


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    made = [Worker(f"window {number}", 1) for number in range(2)]
    yield made
    for worker in made:
        asyncio.run(worker.close())


SCHEDULES: Mapping[str, Schedule] = {
    Profile.BALANCED: Schedule((1, 2), ahead=1, block=12, context=2, refresh=4),
    Profile.OFFLINE: Schedule((), ahead=0, block=12, context=2, refresh=4),
}


def trial_of(sums: Sums, workers: Sequence[Worker], *, most: int = 0) -> Trial:
    return try_windows(sums, SCHEDULES, workers, max_windows=most)


@pytest.mark.parametrize("exact", [1, 2, 4])
def test_windows_are_together_where_that_changes_no_bit(exact: int, workers: list[Worker]) -> None:
    trial = trial_of(Sums(exact), workers)
    sizes = SIZES["cpu"]
    assert set(trial.together) == {"read", "sing"}
    assert set(trial.together["read"].values()) == {tuple(sizes)}
    assert set(trial.together["sing"].values()) == {tuple(size for size in sizes if size <= exact)}
    for stage, most in (("read", max(sizes)), ("sing", exact)):
        for shape in trial.together[stage]:
            assert [trial.most(shape, there) for there in (1, 2, 3, 4, 9)] == [min(most, there) for there in (1, 2, 2, 4, 4)]
    told = trial.why["batch"]
    shapes = len(trial.together["sing"])
    sung = f"up to {exact} windows together, in {shapes} of {shapes} shapes" if exact > 1 else "one window at a time"
    assert told == f"read: up to 4 windows together, in {shapes} of {shapes} shapes; sing: {sung}: what has the same bits together as alone"


def test_every_form_of_a_speech_has_its_seconds_and_no_more_are_together_than_asked(workers: list[Worker]) -> None:
    trial = trial_of(Sums(4), workers, most=2)
    assert {size for sizes in trial.together.values() for each in sizes.values() for size in each} == {2}
    # The first window, those of the last size, and a refreshed one, which has context.
    assert set(trial.seconds) == {(12, 0), (24, 0), (24, 24)} and min(trial.seconds.values()) > 0
    assert trial.speakers > 0 and trial.workers == 2


def test_results_are_of_one_window_of_each_shape_and_the_same_again(workers: list[Worker]) -> None:
    """They are a part of the revision."""
    digests = {hashlib.sha256(torch.stack(list(trial_of(Sums(4), workers).results)).numpy().tobytes()).digest() for _ in range(2)}
    assert len(digests) == 1 and len(trial_of(Sums(4), workers).results) == 2 * 3


@pytest.mark.parametrize("limit", ["SLOW_SECONDS", "TRIAL_SECONDS"])
def test_a_slow_net_computes_one_window_at_a_time(limit: str, workers: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_module, limit, -math.inf)
    trial = trial_of(Sums(4), workers)
    assert {size for sizes in trial.together.values() for size in sizes.values()} == {()} and len(trial.results) == 2 * 3
    assert trial.why["batch"].startswith("read: one window at a time; sing: one window at a time")


def test_a_shape_without_a_trial_is_computed_alone(workers: list[Worker]) -> None:
    assert trial_of(Sums(4), workers).most(("read", "never seen"), 9) == 1


def test_a_step_that_leaves_nothing_to_a_second_thread_is_not_tried_on_two(workers: list[Worker]) -> None:
    class WholeSums(Sums):
        halves = False

        def step(self, jobs: Sequence[Job], aside: Aside | None) -> list[torch.Tensor]:
            assert aside is None
            return super().step(jobs, None)

    trial = trial_of(WholeSums(4), workers)
    assert not trial.halved and set(trial.together["sing"].values()) == {tuple(SIZES["cpu"])}
