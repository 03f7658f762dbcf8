"""Samplers: each scheduler that is taken goes on from what was kept with the same bits, shows the picture that it is on its way to, and
draws what the pipeline of Diffusers draws with it."""

from __future__ import annotations

import inspect
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from torch import Tensor

from helpers import lengths
from helpers.artists import draw, model_of
from helpers.painting import CLOSE, apart, changed, pair
from omnistage.models.checkpoint.files import BadCheckpoint
from omnistage.models.diffusers.sampling import NOISE_WORDS, Memory, PictureSampler, StateLayout, check_scheduler, memory_of, tried_steps
from omnistage.models.interface import BadRequest, DrawRequest

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword"),  # Diffusers with NumPy 2.
    pytest.mark.filterwarnings("ignore:.*algorithm_types dpmsolver and sde-dpmsolver"),  # It is refused here.
]

FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
SCHEDULERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
    ("FlowMatchEulerDiscreteScheduler", {"stochastic_sampling": True}),
    ("FlowMatchLCMScheduler", {}),
    ("UniPCMultistepScheduler", FLOW),
    ("UniPCMultistepScheduler", {"solver_order": 3}),
    ("UniPCMultistepScheduler", FLOW | {"solver_order": 7}),
    ("DPMSolverMultistepScheduler", FLOW | {"solver_order": 3}),
    ("DPMSolverMultistepScheduler", {"use_karras_sigmas": True, "solver_type": "heun"}),
    ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++"}),
    ("EulerDiscreteScheduler", {"prediction_type": "v_prediction"}),
    ("EulerDiscreteScheduler", {"use_exponential_sigmas": True}),
    ("EDMEulerScheduler", {}),
    ("EDMDPMSolverMultistepScheduler", {"solver_order": 3, "sigma_schedule": "exponential", "sigma_max": 500.0}),
    ("EDMDPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++"}),
)
SHAPE = (1, 4, 6, 5)
WIDTH = 8


def scheduled(name: str, config: dict[str, Any], steps: int) -> Any:
    scheduler = getattr(diffusers, name)(**config)
    scheduler.set_timesteps(steps)
    return scheduler


class ArithmeticPicture:
    """A picture by a model of arithmetic, which depends on where it is."""

    def __init__(self, name: str, config: dict[str, Any], steps: int, seed: int) -> None:
        self.memory = memory_of(scheduled(name, config, tried_steps(scheduled(name, config, 2))))
        generator = torch.Generator("cpu").manual_seed(seed)
        self.latents = torch.randn(SHAPE, generator=generator)
        self.sampler = PictureSampler(scheduled(name, config, steps), generator, draws=self.memory.draws)

    def step(self) -> None:
        made = torch.sin(3 * self.sampler.scaled(self.latents)) + 0.1 * self.sampler.step
        self.latents, _ = self.sampler.advance(made, self.latents)

    def finish(self) -> Tensor:
        while not self.sampler.is_done:
            self.step()
        return self.latents


def layout(memory: Memory, steps: int, results: int = 1) -> StateLayout:
    return StateLayout(pair("z-image").plan("x", steps=steps, results=results), int(np.prod(SHAPE)), WIDTH, memory)


@pytest.mark.parametrize(("name", "config"), SCHEDULERS, ids=str)
def test_a_drawing_goes_on_from_what_was_kept_with_the_same_bits(name: str, config: dict[str, Any], seed: int) -> None:
    steps = random.Random(seed).randint(7, 12)
    whole = ArithmeticPicture(name, config, steps, seed).finish()
    first = ArithmeticPicture(name, config, steps, seed)
    written = layout(first.memory, steps)
    kept = list[np.ndarray[Any, Any]]()
    while not first.sampler.is_done:
        first.step()
        if first.sampler.step in written.steps:
            kept.append(written.write([first.sampler.keep(first.latents)]))
    assert len(kept) == 3
    for count in (1, 2, 3):
        history = np.concatenate(kept[:count])
        written.check(history)
        [state] = written.read(history, first.latents)
        again = ArithmeticPicture(name, config, steps, seed + 1)
        again.sampler.restore(state)
        again.latents = state.latents
        assert again.sampler.step == written.steps[count - 1]
        assert torch.equal(again.finish(), whole)


@pytest.mark.parametrize(("name", "config"), SCHEDULERS, ids=str)
def test_what_is_shown_is_the_picture_that_the_model_leads_to(name: str, config: dict[str, Any], seed: int) -> None:
    """A model that knows the picture: by the formula of what it is asked to predict, and by that of what it is given."""
    generator = torch.Generator("cpu").manual_seed(seed)
    picture, noise = torch.randn(SHAPE, generator=generator), torch.randn(SHAPE, generator=generator)
    drawing = ArithmeticPicture(name, config, 5, seed)
    sampler, kind = drawing.sampler, drawing.sampler.scheduler.config.get("prediction_type", "flow_prediction")
    sigma = sampler.sigma
    if "sigma_data" in sampler.scheduler.config:
        kind = "edm"
    if kind == "flow_prediction":
        latents, made = (1 - sigma) * picture + sigma * noise, noise - picture
    elif kind == "edm":
        data = sampler.scheduler.config.sigma_data
        latents, root = picture + sigma * noise, (sigma**2 + data**2) ** 0.5
        made = (picture - data**2 / root**2 * latents) * root / (sigma * data)
    elif name.startswith("Euler"):
        latents = picture + sigma * noise
        made = noise if kind == "epsilon" else ((latents / (sigma**2 + 1) - picture) * (sigma**2 + 1) ** 0.5 / sigma)
    else:
        alpha = 1 / (sigma**2 + 1) ** 0.5
        latents, made = alpha * picture + alpha * sigma * noise, noise
    sampler.scaled(latents)
    _, estimate = sampler.advance(made, latents)
    assert apart(estimate(), picture) <= 1e-3


@pytest.mark.parametrize(("name", "config"), SCHEDULERS, ids=str)
def test_steps_are_those_of_a_loop_of_diffusers(name: str, config: dict[str, Any], seed: int) -> None:
    """With what a model of it is given, of noise that is as large as the scheduler says."""
    drawing = ArithmeticPicture(name, config, 9, seed)
    drawing.latents = drawing.latents * drawing.sampler.noise_scale
    generator, scheduler = torch.Generator("cpu").manual_seed(seed), scheduled(name, config, 9)
    latents = torch.randn(SHAPE, generator=generator) * getattr(scheduler, "init_noise_sigma", 1.0)
    told = {"generator": generator} if "generator" in inspect.signature(scheduler.step).parameters else {}
    for number, time in enumerate(scheduler.timesteps):
        given = scheduler.scale_model_input(latents, time) if hasattr(scheduler, "scale_model_input") else latents
        latents = scheduler.step(torch.sin(3 * given) + 0.1 * number, time, latents, **told).prev_sample
    assert torch.equal(drawing.finish(), latents)


def test_what_a_scheduler_remembers_is_found_out_by_steps() -> None:
    found = {name + str(sorted(config)): memory_of(scheduled(name, config, 6)) for name, config in SCHEDULERS}
    assert found["FlowMatchEulerDiscreteScheduler['shift']"] == Memory(0, draws=False)
    assert found["FlowMatchEulerDiscreteScheduler['stochastic_sampling']"] == Memory(0, draws=True)
    assert found["FlowMatchLCMScheduler[]"] == Memory(0, draws=True)
    assert found[f"UniPCMultistepScheduler{sorted(FLOW)}"] == Memory(3, draws=False)
    assert found["DPMSolverMultistepScheduler['algorithm_type']"] == Memory(2, draws=True)


def test_the_more_is_remembered_the_fewer_states_are_kept() -> None:
    """Above a size none: such a picture goes on from its seed."""
    plan = pair("z-image").plan("x", steps=20)
    kept = [len(StateLayout(plan, 80_000, 16, Memory(tensors, draws=False)).steps) for tensors in (0, 1, 3, 5)]
    assert kept == [3, 1, 0, 0]
    assert StateLayout(plan, 80_000, 16, Memory(0, draws=True)).rows == -(-(80_000 + 1264) // 16)


def test_noise_that_no_generator_draws_is_refused() -> None:
    drawing = ArithmeticPicture("FlowMatchLCMScheduler", {}, 8, 1)
    written = layout(drawing.memory, 8)
    history = written.write([drawing.sampler.keep(drawing.latents)])
    written.check(history)
    broken = history.copy()
    broken.reshape(-1)[-NOISE_WORDS:] = 0xFFFFFFFF
    with pytest.raises(BadRequest, match="noise that no generator draws"):
        written.check(broken)


@pytest.mark.parametrize(
    ("name", "config", "why"),
    [
        ("HeunDiscreteScheduler", {}, "not HeunDiscreteScheduler"),
        ("FlowMatchHeunDiscreteScheduler", {}, "not FlowMatchHeunDiscreteScheduler"),
        ("DPMSolverMultistepScheduler", {"algorithm_type": "dpmsolver", "final_sigmas_type": "sigma_min"}, "predicts noise"),
        ("UniPCMultistepScheduler", {"predict_x0": False}, "predicts noise"),
    ],
)
def test_schedulers_that_steps_are_not_taken_with_are_refused_by_name(name: str, config: dict[str, Any], why: str) -> None:
    with pytest.raises(BadCheckpoint, match=why):
        check_scheduler(scheduled(name, config, 6), "QwenImagePipeline")


@lengths.drawn_cells(
    2,
    ("name", "scheduler", "config"),
    [
        ("qwen-image", "UniPCMultistepScheduler", FLOW | {"use_dynamic_shifting": True, "time_shift_type": "exponential"}),
        ("longcat-image", "UniPCMultistepScheduler", FLOW | {"flow_shift": 2.2}),
        ("z-image", "FlowMatchEulerDiscreteScheduler", {"shift": 3.0, "use_karras_sigmas": True}),
        ("z-image", "FlowMatchLCMScheduler", {}),
    ],
)
def test_drawings_with_other_schedulers_are_those_of_the_pipelines(
    name: str, scheduler: str, config: dict[str, Any], tmp_path: Path, seed: int
) -> None:
    both = pair(name, changed(name, tmp_path / "other", "", scheduler, config))
    plans = [both.plan(words, steps=steps, seed=seed + steps) for words, steps in (("a dog", 3), ("a blue cat", 7), ("x", 8))]
    plans += [both.plan("a hill", sigmas=sigmas, seed=seed) for sigmas in ((0.6,), (1.0, 0.7, 0.69, 0.1))]
    for canvas, plan in zip(both.drawn(*plans), plans, strict=True):
        # The noise of its steps, if any, the pipeline draws from the global generator.
        torch.set_rng_state(both.begun(plan).sampler.generator.get_state())
        latents, _ = both.published(plan)
        # 0.7 and 0.69 are so near that a solver of two steps extrapolates their difference 64-fold, and its rounding too.
        assert apart(canvas.latents, latents) <= (4 * CLOSE if 0.69 in (plan.sigmas or ()) else CLOSE)
        assert canvas.sampler.steps == len(both.pipe.scheduler.timesteps)


@pytest.mark.parametrize(
    ("name", "scheduler", "config"),
    [
        ("qwen-image", "DPMSolverMultistepScheduler", FLOW),
        ("qwen-image", "UniPCMultistepScheduler", {}),
        ("qwen-image", "UniPCMultistepScheduler", FLOW | {"lower_order_final": False}),
        ("z-image", "EDMEulerScheduler", {}),
        ("z-image", "EulerDiscreteScheduler", {}),
    ],
)
def test_a_scheduler_that_the_pipeline_cannot_use_is_refused_when_it_is_loaded(
    name: str, scheduler: str, config: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(BadCheckpoint, match=f"cannot step with {scheduler}"):
        pair(name, changed(name, tmp_path / "other", "", scheduler, config))


def test_a_preview_of_a_multistep_sampler_is_its_own_estimate(tmp_path: Path, seed: int) -> None:
    both = pair("qwen-image", changed("qwen-image", tmp_path / "other", "", "UniPCMultistepScheduler", FLOW))
    plan = replace(both.plan("a dog", steps=6, seed=seed), previews=3)
    with torch.inference_mode():
        canvas = both.begun(plan)
        while not canvas.is_drawn:
            before, sigma = canvas.latents.clone(), canvas.sampler.sigma
            both.painter.forward([canvas])
            velocity = canvas.velocity
            assert velocity is not None
            both.painter.advance(canvas)
            assert canvas.estimate is not None and apart(canvas.estimate, before - sigma * velocity) <= CLOSE


@pytest.mark.parametrize(
    ("name", "scheduler", "config", "sigmas"),
    [
        ("qwen-image", "FlowMatchEulerDiscreteScheduler", {"shift_terminal": 0.02}, (1.0, 1 - 1e-12)),
        ("qwen-image", "FlowMatchEulerDiscreteScheduler", {"shift": 100.0, "shift_terminal": 0.02}, (1.0, 1 - 6e-8)),
        ("z-image", "FlowMatchEulerDiscreteScheduler", {"use_exponential_sigmas": True}, (1.0, 1e-50)),
        ("qwen-image", "UniPCMultistepScheduler", FLOW, (1.0, 0.5, 0.5 - 1e-12)),
        ("qwen-image", "UniPCMultistepScheduler", FLOW, (1.0, 1e-50)),
    ],
)
async def test_sigmas_of_which_the_scheduler_makes_no_steps_are_refused_before_anything_runs(
    name: str, scheduler: str, config: dict[str, Any], sigmas: tuple[float, ...], tmp_path: Path
) -> None:
    folder = changed(name, tmp_path / "other", "", scheduler, config)
    async with model_of(folder, width=32, height=32, steps=3) as model:
        with pytest.raises(BadRequest, match=f"{scheduler} makes no noise levels of them that fall") as refused:
            await model.prepare(DrawRequest(seed=0, prompt="a dog", sigmas=sigmas))
        assert refused.value.field == "diffusion.sigmas"
        assert len((await draw(model, "a dog", sigmas=(1.0, 0.5))).pictures) == 1
