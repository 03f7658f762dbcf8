"""The flow of which sound is made: noise, solvers."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from omnistage.models.qwen2_5_omni.wave.code2wav import noise
from omnistage.models.qwen2_5_omni.wave.window import METHODS, Solver, Trajectory


def test_noise_belongs_to_its_block(seed: int) -> None:
    """Whichever blocks are drawn with it; it is standard normal, and another one for each block and seed."""
    whole = noise(seed, 0, 40, 24, 80).view(40, 24, 80)
    for first in range(0, 37, 7):
        assert torch.equal(noise(seed, first, 3, 24, 80).view(3, 24, 80), whole[first : first + 3])
    assert abs(float(whole.mean())) < 0.02 and abs(float(whole.std()) - 1) < 0.02
    flat = whole.view(40, -1).numpy().astype(np.float64)
    assert np.abs(np.corrcoef(flat) - np.eye(40)).max() < 0.12
    assert not torch.equal(noise(seed + 1, 0, 1, 24, 80), whole[0])
    assert not torch.equal(noise(2**64 - 1, 2**40, 1, 24, 80), noise(2**64 - 2, 2**40, 1, 24, 80))


def solved(name: str, steps: int) -> float:
    """At 1, where y' = y cos(3t) and y(0) = 1."""
    solver = Solver.of(name, steps)
    trajectory = Trajectory(solver, torch.ones(1, dtype=torch.float64))
    for time in solver.evaluation_times():
        trajectory.take(trajectory.point * math.cos(3 * time))
    assert trajectory.done
    return float(trajectory.point)


@pytest.mark.parametrize(("name", "order"), [("rk4", 4), ("midpoint", 2), ("euler", 1)])
def test_a_method_has_its_order(name: str, order: int) -> None:
    """Twice the steps, 2^-order of the error; in float64."""
    exact = math.exp(math.sin(3) / 3)
    coarse, fine = (abs(solved(name, steps) - exact) for steps in (20, 40))
    assert abs(math.log2(coarse / fine) - order) < 0.3


def test_steps_are_evaluations() -> None:
    assert {name: Solver.of(name, 9).evaluations for name in METHODS} == {"rk4": 36, "midpoint": 18, "euler": 9}
    times = Solver.of("rk4", 9).times
    assert times[0] == 0 and times[-1] == 1 and all(begin < end for begin, end in pairwise(times))
    assert np.allclose(times, [1 - math.cos(math.pi / 2 * step / 9) for step in range(10)], atol=1e-6)
