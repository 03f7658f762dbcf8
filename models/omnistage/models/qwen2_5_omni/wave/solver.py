"""Solves the flow from noise to mel frames: explicit Runge-Kutta methods, one evaluation at a time.

The times are as in Token2Wav (Xu et al. 2025) of Transformers: equal steps from 0 to 1, moved towards 0 by the sway sampling of F5-TTS
(Chen et al. 2024) with a coefficient of -1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Method:
    """A Runge-Kutta method, as a Butcher tableau. places: for each evaluation, its time in the step, from 0 to 1. weights: for each
    evaluation, the weights of the step's earlier slopes in its point. result: the weights of all slopes in the result of the step."""

    places: tuple[float, ...]
    weights: tuple[tuple[float, ...], ...]
    result: tuple[float, ...]


METHODS: Mapping[str, Method] = {
    "rk4": Method((0.0, 1 / 3, 2 / 3, 1.0), ((), (1 / 3,), (-1 / 3, 1.0), (1.0, -1.0, 1.0)), (1 / 8, 3 / 8, 3 / 8, 1 / 8)),
    "midpoint": Method((0.0, 0.5), ((), (0.5,)), (0.0, 1.0)),
    "euler": Method((0.0,), ((),), (1.0,)),
}
"""Name -> method; rk4 is the 3/8 rule."""


@dataclass(frozen=True, slots=True)
class Solver:
    """A method, and the ascending times between which it steps."""

    method: Method
    times: tuple[float, ...]

    @classmethod
    def of(cls, name: str, steps: int) -> Solver:
        """The solver with this number of steps. name: key of a method in METHODS."""
        times = torch.linspace(0, 1, steps + 1)
        times += -1.0 * (torch.cos(torch.pi / 2 * times) - 1 + times)
        return cls(METHODS[name], tuple(times.tolist()))

    @property
    def steps(self) -> int:
        return len(self.times) - 1

    @property
    def evaluations(self) -> int:
        return self.steps * len(self.method.places)

    def evaluation_times(self) -> list[float]:
        """The time of each evaluation, from 0 to 1, in order."""
        return [
            begin + (end - begin) * place if place < 1 else end
            for begin, end in zip(self.times[:-1], self.times[1:], strict=True)
            for place in self.method.places
        ]


class Trajectory:
    """Computes one solution, slope by slope. start: the value at time 0. point: the value at which the next slope is needed; when it is
    `done`, the solution. evaluation: number of slopes so far."""

    def __init__(self, solver: Solver, start: torch.Tensor) -> None:
        self._solver = solver
        self._value = self.point = start
        self._slopes: list[torch.Tensor] = []
        self.evaluation = 0

    @property
    def done(self) -> bool:
        return self.evaluation == self._solver.evaluations

    def take(self, slope: torch.Tensor) -> None:
        """Add the slope at `point`, in the same shape, and set `point` to the next value."""
        method, step = self._solver.method, self.evaluation // len(self._solver.method.places)
        length = self._solver.times[step + 1] - self._solver.times[step]
        self._slopes.append(slope)
        self.evaluation += 1
        if len(self._slopes) < len(method.places):
            self.point = self._moved(method.weights[len(self._slopes)], length)
            return
        self._value = self.point = self._moved(method.result, length)
        self._slopes = []

    def _moved(self, weights: Sequence[float], length: float) -> torch.Tensor:
        """The value at the beginning of the step, plus the weighted slopes of the step so far times its length. weights: of these slopes.
        length: of the step, in time."""
        point = self._value
        for weight, slope in zip(weights, self._slopes, strict=True):
            if weight:
                point = torch.add(point, slope, alpha=weight * length)
        return point
