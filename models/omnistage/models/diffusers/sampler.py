"""The sampler of one picture: a scheduler of Diffusers, its memory of its steps, and the generator of its noise.

    latents, the model's result for them --advance--> latents a step further, and the estimate of the picture without noise

With the latents, these are the state of a drawing, from which another replica goes on. A trial finds the attributes of a scheduler
that are its history: a step changes them. The number of steps, and the size of a scheduler's numbers, follow from the plan, so only numbers
that depend on the picture are kept.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from omnistage.models.checkpoint.files import BadCheckpoint

SUPPORTED = (
    *("FlowMatchEulerDiscreteScheduler", "FlowMatchLCMScheduler", "UniPCMultistepScheduler", "DPMSolverMultistepScheduler"),
    *("EulerDiscreteScheduler", "EDMEulerScheduler", "EDMDPMSolverMultistepScheduler", "CosineDPMSolverMultistepScheduler"),
)
"""Schedulers that ask the model once for each step, and are compared with Diffusers in tests."""

TRIED_STEPS = 6

NOISE_BYTES = 5056
"""Bytes of the state of a generator of PyTorch on the CPU (Mersenne Twister)."""


@dataclass(frozen=True, slots=True)
class SamplerState:
    """The state of a picture's sampler after `step` steps. history: tensors that the scheduler remembers and that depend on the picture.
    noise: uint8 [NOISE_BYTES], the state of the generator of the noise of later steps; None if steps draw no noise."""

    step: int
    latents: Tensor
    history: tuple[Tensor, ...] = ()
    noise: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of a scheduler. tensors: how many tensors of the latents' size it keeps, at most. draws: whether steps draw noise."""

    tensors: int
    draws: bool


def check_scheduler(scheduler: Any, pipeline: str) -> None:
    """Raises BadCheckpoint for a scheduler that is not supported here."""
    name = type(scheduler).__name__
    if name not in SUPPORTED:
        raise BadCheckpoint(
            f"scheduler: {pipeline} is drawn here with {', '.join(SUPPORTED)}, not {name}; give a checkpoint with one of these"
        )
    config = scheduler.config
    if config.get("scale_factors"):
        raise BadCheckpoint("scheduler/scheduler_config.json: scale_factors change the size on the way, which drawing here does not follow")
    if not config.get("predict_x0", True) or not str(config.get("algorithm_type", "dpmsolver++")).endswith("dpmsolver++"):
        raise BadCheckpoint("scheduler/scheduler_config.json: it predicts noise; give dpmsolver++, or predict_x0 for UniPC")


def tried_steps(scheduler: Any) -> int:
    """The number of steps for a trial of a scheduler: more than it remembers."""
    return max(TRIED_STEPS, int(scheduler.config.get("solver_order", 1)) + 2)


def min_steps(scheduler: Any) -> int:
    """The smallest number of steps: a schedule that is stretched to end at a given sigma divides by zero for one step."""
    return 2 if scheduler.config.get("shift_terminal") else 1


def memory_of(scheduler: Any, device: torch.device | str = "cpu") -> Memory:
    """The memory of a scheduler, found by steps with few numbers. scheduler: with `tried_steps` timesteps set on the device, used for
    nothing else. Raises ValueError for a scheduler whose steps make no number."""
    sampler, latents, max_tensors = PictureSampler(scheduler, torch.Generator("cpu").manual_seed(0)), torch.zeros(1, 3, 5, device=device), 0
    before = sampler.generator.get_state()
    while not sampler.is_done:
        latents, _ = sampler.advance(torch.zeros_like(latents), latents)
        max_tensors = max(max_tensors, len(list(sampler.remembered(latents.shape))))
    if not torch.isfinite(latents).all():
        raise ValueError(f"{sampler.steps} steps make no number")
    return Memory(max_tensors, draws=not torch.equal(before, sampler.generator.get_state()))


class PictureSampler:
    """The sampler of one picture. scheduler: has its timesteps, and nothing else uses it. generator: draws the noise. draws: whether steps
    draw noise, so that the state of the generator is kept."""

    def __init__(self, scheduler: Any, generator: torch.Generator, *, draws: bool = True) -> None:
        self.scheduler, self.generator, self._draws = scheduler, generator, draws
        scheduler.set_begin_index(0)
        self.step = 0
        self._step_arguments = {"generator": generator} if "generator" in inspect.signature(scheduler.step).parameters else {}
        self._fresh = {name: copy.copy(value) if isinstance(value, list) else value for name, value in vars(scheduler).items()}

    @property
    def steps(self) -> int:
        """The number of all steps. It may differ from the number that was asked for."""
        return len(self.scheduler.timesteps)

    @property
    def is_done(self) -> bool:
        return self.step == self.steps

    @property
    def timestep(self) -> Tensor:
        """The time of the next step, 0-dimensional; 1000 for nothing but noise."""
        time: Tensor = self.scheduler.timesteps[self.step]
        return time

    @property
    def sigma(self) -> Tensor:
        """The noise level of the next step, 0-dimensional; for a flow, 1 is nothing but noise."""
        sigma: Tensor = self.scheduler.sigmas[self.step]
        return sigma

    @property
    def noise_scale(self) -> float:
        """The factor of the noise before the first step; 1 for a flow."""
        return float(getattr(self.scheduler, "init_noise_sigma", 1.0))

    def scaled(self, latents: Tensor) -> Tensor:
        """The latents as the model needs them in the next step: a scheduler that is no flow scales them to the size of its training."""
        scale = getattr(self.scheduler, "scale_model_input", None)
        scaled_latents: Tensor = latents if scale is None else scale(latents, self.timestep)
        return scaled_latents

    def advance(self, model_output: Tensor, latents: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        """Take a step. model_output: for `latents`. Returns the new latents, and a function for the estimate of the latents without noise,
        as they would be if the step led on straight."""
        sigma = self.sigma
        output = self.scheduler.step(model_output, self.timestep, latents, **self._step_arguments)
        self.step += 1
        ready = getattr(output, "pred_original_sample", None)
        if ready is None and getattr(self.scheduler, "model_outputs", None):
            ready = self.scheduler.model_outputs[-1]  # A multistep solver keeps its own estimates.
        if ready is not None:
            return output.prev_sample, lambda: ready.float()
        return output.prev_sample, lambda: latents.float() - sigma * model_output.float()

    def keep(self, latents: Tensor) -> SamplerState:
        """The state after the steps so far, to go on from elsewhere."""
        noise = self.generator.get_state() if self._draws else None
        return SamplerState(self.step, latents, tuple(self.remembered(latents.shape)), noise)

    def restore(self, state: SamplerState) -> None:
        """Go on from a state that was reached elsewhere. Call it before the first step. Raises RuntimeError for an impossible state."""
        self._rehearse(state.step, state.latents)
        tensors = iter(state.history)
        for name, value in self._history():
            setattr(self.scheduler, name, _refill(value, state.latents.shape, tensors))
        if state.noise is not None:
            self.generator.set_state(state.noise)

    def remembered(self, shape: torch.Size) -> Iterator[Tensor]:
        """Yields the tensors of this shape in the sampler's history."""
        for _, value in self._history():
            yield from (
                each for each in (value if isinstance(value, list) else [value]) if isinstance(each, Tensor) and each.shape == shape
            )

    def _rehearse(self, step: int, latents: Tensor) -> None:
        """Take steps of zeros up to step `step`: then only values that depend on the picture are not as after real steps."""
        zeros = torch.zeros_like(latents)
        while self.step < step:
            self.advance(zeros, zeros)

    def _history(self) -> Iterator[tuple[str, Any]]:
        """Yields name and value of the attributes of the scheduler that steps have changed."""
        for name, value in sorted(vars(self.scheduler).items()):
            fresh = self._fresh.get(name)
            if value is not fresh and not (isinstance(value, list) and all(map(operator.is_, value, fresh or ()))):
                yield name, value


def _refill(value: Any, shape: torch.Size, tensors: Iterator[Tensor]) -> Any:
    """An attribute of the scheduler, a tensor or list, with the next kept tensors in the place of its tensors of that shape."""
    if isinstance(value, list):
        return [_refill(each, shape, tensors) for each in value]
    return next(tensors).to(value) if isinstance(value, Tensor) and value.shape == shape else value
