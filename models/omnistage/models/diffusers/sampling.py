"""The sampler of one picture, its states that a caller keeps, and the step cache.

    latents, the model's result for them --advance--> latents a step further, and the estimate of the picture without noise

**The sampler** is a scheduler of Diffusers, its memory of its steps, and the generator of its noise. With the latents, these are the
state of a drawing, from which another replica goes on. A trial finds the attributes of a scheduler that are its history: a step changes
them. The number of steps, and the size of a scheduler's numbers, follow from the plan, so only numbers that depend on the picture are
kept.

**States** are kept by the caller, so that a replica which takes over goes on at a step and not at the first one. They are the bits of
float32 values, as codes, because callers keep codes. A picture gets a few states, and only as many as fit into the message that opens
the next session. The state of a picture holds its latents, the tensors that its sampler remembers, filled up to the largest number that
it ever remembers, and the state of its noise.

**The step cache**: steps that change little are not computed whole, and each row of a batch decides for itself. The first block of a
transformer is always computed. Its residual is what the block adds to a row. If the residual is nearly as in the last step that was
computed whole, the other blocks would add nearly the same as they did then; the row gets that sum again, and skips these blocks. Rows of
one pass that need the other blocks go through them together without the others. Hooks of Diffusers for the same aim keep one state for a
whole module, where pictures that join and leave would get each other's state. A request that wants the cache says how much the residual
may change, in parts of itself; the more it may change, the fewer blocks are computed and the further is the picture from a picture
without the cache. The skipped steps are reported with the picture."""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from omnistage.models.checkpoint.files import BadCheckpoint
from omnistage.models.diffusers.plan import DrawingPlan
from omnistage.models.interface import BadRequest

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
    sampler, latents = PictureSampler(scheduler, torch.Generator("cpu").manual_seed(0)), torch.zeros(1, 3, 5, device=device)
    first_noise, max_tensors = sampler.generator.get_state(), 0
    while not sampler.is_done:
        latents, _ = sampler.advance(torch.zeros_like(latents), latents)
        max_tensors = max(max_tensors, len(list(sampler.remembered(latents.shape))))
    if not torch.isfinite(latents).all():
        raise ValueError(f"{sampler.steps} steps make no number")
    return Memory(max_tensors, draws=not torch.equal(first_noise, sampler.generator.get_state()))


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
        own_estimate = getattr(output, "pred_original_sample", None)
        if own_estimate is None and getattr(self.scheduler, "model_outputs", None):
            own_estimate = self.scheduler.model_outputs[-1]  # A multistep solver keeps its estimates.
        if own_estimate is not None:
            return output.prev_sample, lambda: own_estimate.float()
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
            entries = value if isinstance(value, list) else [value]
            yield from (entry for entry in entries if isinstance(entry, Tensor) and entry.shape == shape)

    def _rehearse(self, step: int, latents: Tensor) -> None:
        """Take steps of zeros up to step `step`. Then only values that depend on the picture differ from those after real steps."""
        zeros = torch.zeros_like(latents)
        while self.step < step:
            self.advance(zeros, zeros)

    def _history(self) -> Iterator[tuple[str, Any]]:
        """Yields name and value of the attributes of the scheduler that steps have changed."""
        for name, value in sorted(vars(self.scheduler).items()):
            fresh = self._fresh.get(name)
            # Lists were copied at the beginning: an unchanged list has the same objects in it.
            is_equal_list = isinstance(value, list) and all(map(operator.is_, value, fresh or ()))
            if value is not fresh and not is_equal_list:
                yield name, value


def _refill(value: Any, shape: torch.Size, tensors: Iterator[Tensor]) -> Any:
    """An attribute of the scheduler, a tensor or list, with the next kept tensors in the place of its tensors of that shape."""
    if isinstance(value, list):
        return [_refill(each, shape, tensors) for each in value]
    return next(tensors).to(value) if isinstance(value, Tensor) and value.shape == shape else value


CHECKPOINT = "checkpoint"
MAX_STATES = 3
"""How many states of one picture are kept, at most."""
MAX_WORDS = 1 << 18
"""How many words all checkpoints of a session have together, at most; a word takes up to five bytes of a message."""
NOISE_WORDS = NOISE_BYTES // 4


class StateLayout:
    """The form in which the states of the pictures of a plan are written, as words of 32 bits. values: number of values in the latents of
    one picture. width: words of a row; rows: number of rows of the states of all pictures after one step. memory: of the scheduler."""

    def __init__(self, plan: DrawingPlan, values: int, width: int, memory: Memory) -> None:
        self.width, self._values, self._memory, self._pictures = width, values, memory, plan.results
        self._noise = NOISE_WORDS if memory.draws else 0
        words = values * (1 + memory.tensors) + self._noise
        picture_rows = -(-words // width)
        self.rows, self._picture_words = picture_rows * plan.results, picture_rows * width
        count = 0 if plan.step_cache else min(MAX_STATES, MAX_WORDS // (self.rows * width), plan.steps - 1)
        self.steps = tuple(-(-plan.steps * number // (count + 1)) for number in range(1, count + 1))
        """The steps after which states are kept, evenly spread. With a step cache, whose memory is not kept, there are none."""

    def check(self, history: NDArray[np.uint32]) -> None:
        """Raises BadRequest for a history that this plan cannot have made."""
        max_rows = self.rows * len(self.steps)
        if history.ndim != 2 or history.shape[1] != self.width or len(history) > max_rows:
            raise BadRequest("resume.history", f"port {CHECKPOINT!r} has at most {max_rows} rows of {self.width} for this request")
        words = np.ascontiguousarray(history).reshape(-1)
        places = np.arange(len(words)) % self._picture_words
        # The words of a picture after its values are no float32: they fill up its rows, and end with the state of its noise.
        if not np.isfinite(words[places < self._values * (1 + self._memory.tensors)].view(np.float32)).all():
            raise BadRequest("resume.history", f"port {CHECKPOINT!r} has values that are no numbers")
        if self._noise:
            for words in self._by_picture(history[: len(history) // self.rows * self.rows]):
                try:
                    torch.Generator("cpu").set_state(self._noise_of(words))
                except RuntimeError as error:
                    raise BadRequest("resume.history", f"port {CHECKPOINT!r} has noise that no generator draws: {error}") from None

    def write(self, states: Sequence[SamplerState]) -> NDArray[np.uint32]:
        """The states after one step, one for each picture that is drawn, as rows: [rows, width]."""
        words = np.zeros((self._pictures, self._picture_words), np.uint32)
        for row, state in zip(words[-len(states) :], states, strict=True):
            values = torch.cat([each.float().flatten() for each in (state.latents, *state.history)]).cpu().numpy().view(np.uint32)
            row[: len(values)] = values
            if state.noise is not None:
                row[-self._noise :] = state.noise.numpy().view(np.uint32)
        return words.reshape(-1, self.width)

    def read(self, history: NDArray[np.uint32], latents: Tensor) -> list[SamplerState]:
        """The last states in the history, one for each picture; empty if no step is whole. latents: of the same shape and type."""
        whole_steps = len(history) // self.rows
        if not whole_steps:
            return []
        step, rows = self.steps[whole_steps - 1], history[(whole_steps - 1) * self.rows : whole_steps * self.rows]
        return [self._state(step, words, latents) for words in self._by_picture(rows)]

    def _by_picture(self, history: NDArray[np.uint32]) -> NDArray[np.uint32]:
        return history.reshape(-1, self._picture_words)

    def _state(self, step: int, words: NDArray[np.uint32], latents: Tensor) -> SamplerState:
        """The state of one picture, read from all of its words. step: number of steps that it has taken. latents: as in `read`."""
        count = 1 + self._memory.tensors
        values = torch.from_numpy(words[: count * self._values].copy().view(np.float32)).reshape(count, *latents.shape).to(latents.device)
        return SamplerState(step, values[0].to(latents), tuple(values[1:]), self._noise_of(words) if self._noise else None)

    def _noise_of(self, words: NDArray[np.uint32]) -> Tensor:
        return torch.from_numpy(words[-self._noise :].copy().view(np.uint8))


@dataclass(eq=False, slots=True)
class Residuals:
    """The residuals of one row, over its steps. threshold: largest change at which a step is not computed whole; 0: all steps are. first:
    the sum that the first block added in the last step that was computed whole; rest: the sum that the other blocks added; both [tokens,
    width]. reused: number of steps that were not computed whole; largest: the largest change in these steps."""

    threshold: float
    first: Tensor | None = None
    rest: Tensor | None = None
    reused: int = 0
    largest: float = 0.0

    def change(self, first: Tensor) -> float:
        """The change from the last residual of the first block to this one, as a part of the last one; infinite if there was none."""
        if self.first is None or self.rest is None:
            return float("inf")
        return float((first - self.first).abs().mean() / self.first.abs().mean().clamp(min=1e-12))


@dataclass(slots=True)
class _Pass:
    """One pass of several rows. lengths: number of tokens of each row without its padding, which comes last; None: all. base: the rows
    after the first block. added, changes: the sum that the first block added to each row, and its change. kept_numbers: of the rows that go
    through the other blocks. reused: the other rows, each with its change. computed: the new first and rest of the kept rows."""

    residuals: Sequence[Residuals]  # One for each row.
    lengths: Sequence[int | None]
    base: Tensor | None = None
    added: list[Tensor] = field(default_factory=list)
    changes: list[float] = field(default_factory=list)
    kept_numbers: list[int] = field(default_factory=list)
    reused: list[tuple[Residuals, float]] = field(default_factory=list)
    computed: list[tuple[Residuals, Tensor, Tensor]] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return len(self.kept_numbers) == len(self.residuals)


class StepCache:
    """The step cache of one transformer. Outside of `applied` the blocks compute as ever.

    blocks: all of them, in order. The rows are the first argument of each, or `hidden_states`; it returns them alone or last. batched:
    names and positions of its other arguments that have one row, or two, for each row."""

    def __init__(self, blocks: Sequence[nn.Module], batched: Sequence[str | int]) -> None:
        self._batched = frozenset(batched)
        self._pass: _Pass | None = None
        self._last = len(blocks) - 1
        for number, block in enumerate(blocks):
            if self._last:  # One block alone leaves nothing to skip.
                block.forward = self._with_cache(number, block.forward)

    @contextmanager
    def applied(self, residuals: Sequence[Residuals], lengths: Sequence[int | None]) -> Iterator[None]:
        """In this context the cache serves one pass. residuals, lengths: one for each row, as in _Pass."""
        if not any(each.threshold for each in residuals):
            yield
            return
        self._pass = batch = _Pass(residuals, lengths)
        try:
            yield
        finally:
            self._pass = None
        # A failed pass leaves nothing here: each picture takes it again alone.
        for each, change in batch.reused:
            each.reused += 1
            each.largest = max(each.largest, change)
        for each, first, rest in batch.computed:
            each.first, each.rest = first, rest

    def _with_cache(self, number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The `forward` of the block with that number, which uses the cache within a pass."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._pass is None:
                return forward(*args, **kwargs)
            if not number:
                return self._run_first(self._pass, forward, args, kwargs)
            return self._run_other(self._pass, number == self._last, forward, args, kwargs)

        return watched

    def _run_first(self, batch: _Pass, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute the first block with its arguments, return its result, and decide which rows go through the other blocks."""
        before = args[0] if args else kwargs["hidden_states"]
        output = forward(*args, **kwargs)
        batch.base = _rows(output)
        added = batch.base - before
        for row, (residuals, length) in enumerate(zip(batch.residuals, batch.lengths, strict=True)):
            batch.added.append(added[row, :length])
            change = residuals.change(batch.added[row]) if residuals.threshold else float("inf")
            batch.changes.append(change)
            if not change < residuals.threshold:  # This also holds for a change that is no number.
                batch.kept_numbers.append(row)
        return output

    def _run_other(self, batch: _Pass, is_last: bool, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute another block for the kept rows alone; after the last block all rows are put together again."""
        count = len(batch.residuals)
        rows = args[0] if args else kwargs["hidden_states"]
        text_rows = kwargs.get("encoder_hidden_states")
        if batch.kept_numbers:
            # Between the first block and the last there are only the kept rows.
            picked = [self._pick_rows(batch, place, value, count) for place, value in enumerate(args)]
            output = forward(*picked, **{name: self._pick_rows(batch, name, value, count) for name, value in kwargs.items()})
        else:
            output = rows if text_rows is None else (text_rows, rows)  # No row needs this block: its input goes on to the next.
        if not is_last:
            return output
        all_rows = self._join_rows(batch, _rows(output))
        return all_rows if isinstance(output, Tensor) else (*output[:-1], all_rows)

    def _pick_rows(self, batch: _Pass, place: str | int, value: Any, count: int) -> Any:
        """An argument of a block, for the kept rows alone. place: its position or name. count: number of all rows."""
        has_rows = place in (0, "hidden_states", "encoder_hidden_states") or place in self._batched
        if batch.is_whole or not isinstance(value, Tensor) or not has_rows or len(value) == len(batch.kept_numbers):
            return value
        index = torch.tensor(batch.kept_numbers, device=value.device)
        # An argument with two entries for each row has all first entries before all second ones.
        return value[index if len(value) == count else torch.cat([index, index + count])]

    def _join_rows(self, batch: _Pass, rows: Tensor) -> Tensor:
        """All rows after the last block. rows: its result, the kept rows. Other rows get the sum of their last whole step."""
        assert batch.base is not None
        all_rows, kept_rows = batch.base.clone(), iter(rows if batch.kept_numbers else ())
        for row, (residuals, length) in enumerate(zip(batch.residuals, batch.lengths, strict=True)):
            if row in batch.kept_numbers:
                all_rows[row] = next(kept_rows)
                if residuals.threshold:
                    batch.computed.append((residuals, batch.added[row].clone(), (all_rows[row] - batch.base[row])[:length].clone()))
            else:
                assert residuals.rest is not None
                all_rows[row, :length] += residuals.rest
                batch.reused.append((residuals, batch.changes[row]))
        return all_rows


def _rows(output: Any) -> Tensor:
    rows: Tensor = output if isinstance(output, Tensor) else output[-1]
    return rows
