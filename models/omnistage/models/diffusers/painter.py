"""A family's own loop around the modules of Diffusers: the work for each request, for each step, and at the end.

A pipeline of Diffusers draws one batch from its first step to its last. Here each picture has a scheduler of its own, so that pictures join
and leave at any step. Pictures of one step share a forward pass even if their steps, seeds, guidance and prompts differ.
"""

from __future__ import annotations

import copy
import inspect
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from diffusers import DiffusionPipeline
from PIL.Image import Image
from torch import Tensor

from omnistage.models.checkpoint.files import BadCheckpoint
from omnistage.models.diffusers.options import Defaults
from omnistage.models.diffusers.own_options import Range, own_options
from omnistage.models.diffusers.placement import is_spread
from omnistage.models.diffusers.plan import DrawingLimits, DrawingPlan, EditedPicture
from omnistage.models.diffusers.sampling import (
    Memory,
    PictureSampler,
    Residuals,
    SamplerState,
    StepCache,
    check_scheduler,
    memory_of,
    tried_steps,
)
from omnistage.models.interface import BadRequest, Failed, Preview, Wanted
from omnistage.models.media.terms import BadMedia
from omnistage.models.memory import TensorCache
from omnistage.models.steps.session import Product

TOKEN_LIMIT = "max_sequence_length"
"""An option of some pipelines: the number of tokens of a prompt that are drawn."""
ACTED_ON = re.compile(r"self\.(transformer|vae|text_encoder)\.config(?:\.get\(|, |\.)[\"']?(\w+)")


def check_followed(pipe: Any, followed: Container[str]) -> None:
    """Raises BadCheckpoint for a config by which the pipeline of Diffusers would do something that the loop here does not do: values that
    its source mentions must be the usual values. followed: names, as part.name, of values that the loop follows too."""
    for part, name in sorted(set(ACTED_ON.findall(inspect.getsource(type(pipe))))):
        model: Any = getattr(pipe, part, None)
        if model is None or f"{part}.{name}" in followed or name not in model.config:
            continue
        parameter = inspect.signature(type(model)).parameters.get(name)
        if parameter is None or model.config[name] != parameter.default:
            fault = f"{name!r} is {str(model.config[name])[:80]}, which drawing here does not follow"
            raise BadCheckpoint(f"{part}/config.json: {fault}; give a checkpoint without it")


@dataclass(frozen=True, slots=True)
class Conditions:
    """The words and pictures of a plan, encoded.

    positive, negative: [tokens, width], rows of the text encoder; negative is None without guidance. images: [tokens, channels], latents of
    the pictures that are edited, packed as the transformer takes them; for a film, see its painter. shapes: (frames, height, width) in
    tokens of the result and of each edited picture. image_rows: [pictures, tokens, width], rows of an encoder of pictures.
    """

    positive: Tensor
    negative: Tensor | None
    images: Tensor | None = None
    shapes: tuple[tuple[int, int, int], ...] = ()
    image_rows: Tensor | None = None


@dataclass(eq=False, slots=True)
class Canvas:
    """One picture while it is drawn, all its layers together. latents: after the sampler's steps, in the family's form. velocity: result of
    the last pass; None before it. estimate: the latents without noise, as far as the velocity shows them; only for previews."""

    plan: DrawingPlan
    conditions: Conditions  # The encoded words and pictures.
    latents: Tensor
    sampler: PictureSampler
    velocity: Tensor | None = None
    estimate: Tensor | None = None
    residuals: tuple[Residuals, Residuals] = field(init=False)
    """The residuals of the row with the prompt, and of the row that guidance leads away from."""

    def __post_init__(self) -> None:
        self.residuals = (Residuals(self.plan.step_cache), Residuals(self.plan.step_cache))

    @property
    def is_drawn(self) -> bool:
        """Whether all steps are done."""
        return self.sampler.is_done

    @property
    def scaled(self) -> Tensor:
        """The latents as the transformer takes them."""
        return self.sampler.scaled(self.latents)


class CanvasProduct(Product[DrawingPlan, Sequence[Canvas]], Protocol):
    """A product of steps; its latents are canvases, one for each result that has not been made yet."""

    def first(self, plan: DrawingPlan, ports: Wanted) -> int:
        """The number of the first result that must be drawn: the client has the earlier results."""

    def preview(self, canvas: Canvas) -> Sequence[Preview]:
        """The previews of the last step, if one is due."""


class BatchRow(NamedTuple):
    """The inputs of one row of a batch. text: [tokens, width]."""

    canvas: Canvas
    text: Tensor
    residuals: Residuals


class Painter(ABC):
    """The loop of one pipeline. `limits`, `tokens`, `check_text` and `group` may run on other threads, everything else runs on the thread
    of the model. Do not call `check_text` on an event loop: a long text takes its time."""

    followed: ClassVar[frozenset[str]]
    """Values of configs that the loop follows as the pipeline does, as part.name. All values of schedulers are followed."""
    follows: ClassVar[Mapping[str, Range]] = {}
    """The pipeline's own options that the loop here follows exactly, with the smallest and largest value of each."""

    def __init__(self, pipe: DiffusionPipeline, texts: TensorCache, pictures: TensorCache, defaults: Defaults) -> None:
        """texts, pictures: caches of the encoders' results. defaults: the user's options and the folder's defaults."""
        check_scheduler(pipe.scheduler, type(pipe).__name__)
        check_followed(pipe, self.followed)
        self.pipe: Any = pipe
        self._texts, self._pictures = texts, pictures
        self.device, self.dtype = self.pipe._execution_device, self.pipe.transformer.dtype  # Where it computes; weights may be elsewhere.
        self.memory = self._tried_memory()
        self._area = defaults.options.condition_area
        limits = replace(defaults.applied(self._own_limits()), options=own_options(type(pipe).__call__, None, self.follows))
        # With several ranks no block may be left out here: the other ranks would compute it, and wait for this rank.
        self._limits = replace(limits, step_cached=limits.step_cached and not is_spread(self.pipe.transformer))
        self._step_cache = self.own_step_cache()
        self.counting = copy.deepcopy(self.pipe.tokenizer)
        """A tokenizer for `text_tokens` alone: a tokenizer serves one thread at a time."""
        self._counts = threading.Lock()
        self._special = tuple(token.content for token in self.counting.added_tokens_decoder.values() if token.special)

    # 1: parameters

    @property
    def limits(self) -> DrawingLimits:
        return self._limits

    def _default(self, name: str) -> Any:
        """The pipeline's default for a parameter of its `__call__`; its other functions may have other defaults."""
        return inspect.signature(type(self.pipe).__call__).parameters[name].default

    @abstractmethod
    def _own_limits(self) -> DrawingLimits:
        """The limits of the pipeline, before anybody chose others."""

    def check_text(self, text: str) -> int:
        """The number of tokens of a text. Raises ValueError if it is longer than the encoder reads, or has special tokens, which are no
        text."""
        if special_token := next((token for token in self._special if token in text), None):
            raise ValueError(f"it has {special_token}, a special token of the text encoder: leave it out")
        with self._counts:
            count, limit = self.text_tokens(text)
        if count > limit:
            raise ValueError(f"it has {count} tokens, and the text encoder reads {limit}: make it shorter")
        return count

    @abstractmethod
    def text_tokens(self, text: str) -> tuple[int, int]:
        """The number of tokens of a text, and its limit."""

    def sized(self, plan: DrawingPlan) -> DrawingPlan:
        """The plan with the size that follows from its images, if the family takes the size from them."""
        return plan

    def edited(self, plan: DrawingPlan, image: Image) -> EditedPicture:
        """The form in which a picture that is edited (RGB or RGBA) is kept: in each size that an encoder needs. Runs on any thread. Raises
        BadMedia for a picture that the encoders cannot look at."""
        sizes = self._fits(plan, image.width / image.height)
        if min(map(min, sizes)) < 1:
            raise BadMedia("it is too long and thin to be looked at: send one that is less long")
        resized = tuple(self.pipe.image_processor.resize(image, height, width) for width, height in sizes)
        return EditedPicture(image.width, image.height, resized)

    def _fits(self, plan: DrawingPlan, ratio: float) -> list[tuple[int, int]]:
        """The widths and heights that the encoders need for a picture. ratio: its width divided by its height."""
        raise NotImplementedError

    @abstractmethod
    def tokens(self, plan: DrawingPlan) -> int:
        """The number of latent tokens of one row, in the result and in the edited pictures."""

    # 2: preprocess

    def encode(self, plan: DrawingPlan) -> Conditions:
        return self._conditions(plan)

    @abstractmethod
    def _conditions(self, plan: DrawingPlan) -> Conditions: ...

    @abstractmethod
    def text(self, plan: DrawingPlan, text: str) -> Tensor:
        """[tokens, width]: the rows of a text, with the pictures of the plan if the encoder sees them too."""

    def texts(self, plan: DrawingPlan) -> tuple[Tensor, Tensor | None]:
        """The rows of the prompt, and of the text that guidance leads away from (None without guidance). The cache keeps both."""
        positive, negative = (
            None if text is None else self._texts.get((text, plan.sources, self.words_drawn(plan)), partial(self.text, plan, text))
            for text in (plan.prompt, plan.negative)
        )
        assert positive is not None
        return positive, negative

    def words_drawn(self, plan: DrawingPlan) -> int:
        """The number of tokens that the pipeline reads, if a request can set it; else 0."""
        return int(plan.option(TOKEN_LIMIT, self._default(TOKEN_LIMIT))) if TOKEN_LIMIT in self.follows else 0

    @abstractmethod
    def noise(self, plan: DrawingPlan, conditions: Conditions, generator: torch.Generator) -> Tensor:
        """The noise that a picture begins with."""

    @abstractmethod
    def sigmas(self, steps: int) -> Any:
        """The sigmas of `steps` steps as the pipeline sets them, before the scheduler shifts them."""

    @abstractmethod
    def shift(self, plan: DrawingPlan) -> float:
        """mu: how far the schedule of a picture of this size is shifted towards noise, if the config asks for a shift."""

    def _scheduled(self, sigmas: Any, mu: float, device: torch.device | str) -> Any:
        """A new scheduler with its timesteps set as the pipeline sets them."""
        scheduler = type(self.pipe.scheduler).from_config(self.pipe.scheduler.config)
        scheduler.set_timesteps(sigmas=sigmas, device=device, mu=mu)
        return scheduler

    def _scheduled_for(self, plan: DrawingPlan, device: torch.device | str) -> Any:
        # An array, because UniPC computes with the argument itself.
        return self._scheduled(np.array(plan.sigmas) if plan.sigmas else self.sigmas(plan.steps), self.shift(plan), device)

    def check_steps(self, plan: DrawingPlan) -> None:
        """Raises BadRequest if the scheduler makes no falling noise levels for the plan, which has its size. Runs on any thread."""
        try:
            with np.errstate(all="ignore"):
                scheduler = self._scheduled_for(plan, "cpu")
            sigmas = 1 - scheduler.sigmas if scheduler.config.get("invert_sigmas") else scheduler.sigmas
            levels = sigmas[:-1]  # The level after them is the end of the last step: 0, or the last level again.
            does_fall = bool(torch.isfinite(sigmas).all() and (levels > 0).all() and (levels.diff() < 0).all())
        except (ArithmeticError, ValueError):  # Such as the logarithm of 0.
            does_fall = False
        if not does_fall:
            fault = f"{type(self.pipe.scheduler).__name__} makes no noise levels of them that fall"
            if plan.sigmas:
                raise BadRequest("diffusion.sigmas", f"{fault}: give fewer, further from each other and from 0, or steps alone")
            if plan.flow_shift:
                raise BadRequest("diffusion.flow_shift", f"{fault}: give one nearer to 1, not {plan.flow_shift:g}, or leave it out")
            raise BadRequest("diffusion.steps", f"{fault}: ask for more or fewer than {plan.steps}")

    def _tried_memory(self) -> Memory:
        """The memory of the scheduler, found by trying it. Raises BadCheckpoint for a scheduler that the pipeline cannot use."""
        try:
            return memory_of(self._scheduled(self.sigmas(tried_steps(self.pipe.scheduler)), 1.0, self.device), self.device)
        except Exception as error:  # a scheduler raises every kind of error for a bad config
            fault = f"cannot step with {type(self.pipe.scheduler).__name__}: {' '.join(str(error).split())[:200]}"
            raise BadCheckpoint(f"scheduler/scheduler_config.json: {type(self.pipe).__name__} {fault}") from error

    def canvas(self, plan: DrawingPlan, conditions: Conditions, number: int) -> Canvas:
        """The result with that number, as noise before its first step."""
        generator = torch.Generator("cpu").manual_seed(plan.seed_of(number))
        latents = self.noise(plan, conditions, generator)
        sampler = PictureSampler(self._scheduled_for(plan, self.device), generator, draws=self.memory.draws)
        return Canvas(plan, conditions, latents * sampler.noise_scale, sampler)

    def go_on(self, canvas: Canvas, state: SamplerState) -> None:
        """Set a canvas to the state that its drawing reached elsewhere."""
        canvas.sampler.restore(state)
        canvas.latents = state.latents

    # 3: execute

    @abstractmethod
    def group(self, canvas: Canvas) -> Hashable:
        """Pictures of equal groups can share a pass."""

    @abstractmethod
    def own_step_cache(self) -> StepCache:
        """The step cache around the blocks of the transformer."""

    def length(self, row: BatchRow) -> int | None:
        """The number of tokens of a row inside the transformer; None if all rows of a pass are equally long."""
        return None

    @abstractmethod
    def velocities(self, rows: Sequence[BatchRow]) -> list[Tensor]:
        """The transformer's output for each row, in the shape of its latents: the way from the picture to the noise."""

    def guided(self, positive: Tensor, negative: Tensor, canvas: Canvas) -> Tensor:
        """The velocity for the next step, from both velocities (Ho and Salimans 2022, classifier-free guidance)."""
        return negative + canvas.plan.guidance * (positive - negative)

    def is_guided(self, canvas: Canvas) -> bool:
        """Whether the next step of the canvas is guided."""
        return canvas.conditions.negative is not None

    def forward(self, canvases: Sequence[Canvas]) -> None:
        """Compute one pass for one step of all canvases; only their `velocity` is changed."""
        rows = list[BatchRow]()
        for canvas in canvases:
            rows.append(BatchRow(canvas, canvas.conditions.positive, canvas.residuals[0]))
            if self.is_guided(canvas):
                assert canvas.conditions.negative is not None
                rows.append(BatchRow(canvas, canvas.conditions.negative, canvas.residuals[1]))
        with self._step_cache.applied([row.residuals for row in rows], [self.length(row) for row in rows]):
            velocities = iter(self.velocities(rows))
        for canvas in canvases:
            positive = next(velocities)
            canvas.velocity = self.guided(positive, next(velocities), canvas) if self.is_guided(canvas) else positive

    def advance(self, canvas: Canvas) -> None:
        """Take the step that the velocity leads to. Raises Failed for a picture with values that are no numbers."""
        assert canvas.velocity is not None
        latents, estimate = canvas.sampler.advance(canvas.velocity, canvas.latents)
        if canvas.plan.previews:
            canvas.estimate = estimate()
        if not torch.isfinite(latents).all():
            step_text = f"after step {canvas.sampler.step} of {canvas.sampler.steps}"
            raise Failed(f"the picture is no number {step_text}: with these weights, words and numbers of steps it cannot be drawn")
        canvas.latents, canvas.velocity = latents, None

    # 4: postprocess

    @property
    @abstractmethod
    def channels(self) -> int:
        """The number of channels of latents as the VAE has them."""

    @abstractmethod
    def values(self, plan: DrawingPlan) -> int:
        """The number of values in the latents of one result."""

    @abstractmethod
    def product(self, model: str) -> CanvasProduct:
        """The product that the latents become. model: its name, which files state about themselves."""


def with_images(row: BatchRow) -> Tensor:
    """Packed latents, [1, tokens, channels]: first of the result, then of the edited pictures."""
    images = row.canvas.conditions.images
    return row.canvas.scaled if images is None else torch.cat([row.canvas.scaled, images[None]], dim=1)


def pad_texts(texts: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Pad n texts to the longest: [n, longest, width], and bool [n, longest], true for tokens; None if all are equally long."""
    max_tokens = max(len(text) for text in texts)
    if all(len(text) == max_tokens for text in texts):
        return torch.stack(list(texts)), None
    mask = torch.arange(max_tokens)[None] < torch.tensor([len(text) for text in texts])[:, None]
    return torch.nn.utils.rnn.pad_sequence(list(texts), batch_first=True), mask.to(texts[0].device)


def linear_shift(scheduler: Any, tokens: int) -> float:
    """mu of a picture of `tokens` tokens, by the formula that these pipelines share: linear between two lengths of the config."""
    config = scheduler.config
    base_tokens, max_tokens = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    low, high = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    # The order of operations matters: another order changes mu by a bit.
    slope = (high - low) / (max_tokens - base_tokens)
    return float(tokens * slope + (low - slope * base_tokens))
