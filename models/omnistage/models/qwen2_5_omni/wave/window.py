"""Computes windows of speeches, from noise to samples, in steps of many windows together.

codes, voice --conditions--> noise --Flow: evaluations of the net, solver--> mel frames --Vocoding, piece by piece--> samples

A window needs only the state that the flow of the previous window leaves, so it can begin while the previous window becomes sound. The flow
is solved by explicit Runge-Kutta methods, one evaluation at a time. Its times are as in Token2Wav (Xu et al. 2025) of Transformers: equal
steps from 0 to 1, moved towards 0 by the sway sampling of F5-TTS (Chen et al. 2024) with a coefficient of -1."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from omnistage.models.qwen2_5_omni.wave.config import AHEAD_LAYERS, BACK_LAYERS, WaveConfig
from omnistage.models.qwen2_5_omni.wave.dit import Dit
from omnistage.models.qwen2_5_omni.wave.vocoder import FIELD, Vocoder
from omnistage.models.speech.schedule import Window
from omnistage.models.steps.loop import Aside

SLICE_BLOCKS = 24
"""Largest number of blocks of a window that one step evaluates, because other windows wait for the step, and a signal to end the server
does too. Only windows of whole speeches have more blocks."""

PIECE_FRAMES = 144
"""Largest number of mel frames that become sound in one step: as many as the largest chunk of a streaming schedule has."""


@dataclass(eq=False, slots=True)
class Flow:
    """The first part of a window's work: from noise to mel frames.

    chunk: number of frames that become sound. context, ahead_frames: numbers of frames before and after the chunk. begin: makes the noise,
    padded to whole blocks, and the conditions of Dit.conditions; the first step calls it, because both may be large. state_in: of the
    previous window, [evaluations, *Dit.kept_shape()]; None: it needs none. state_out: is filled with the state for the next window, in the
    same shape; None: no window needs it. slopes: if an evaluation takes several steps, the slopes of the blocks that are done."""

    context: int
    chunk: int
    ahead_frames: int
    begin: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    state_in: torch.Tensor | None
    state_out: torch.Tensor | None
    slopes: list[torch.Tensor] = field(default_factory=list)
    _beginning: tuple[Trajectory, torch.Tensor] | None = None  # the solution so far, and the conditions; None before `prepare`

    @property
    def frames(self) -> int:
        return self.context + self.chunk + self.ahead_frames

    @property
    def done(self) -> bool:
        return self._beginning is not None and self.trajectory.done

    @property
    def mel(self) -> torch.Tensor:
        """The solution, without padding, [frames, mel_bins]."""
        return self.trajectory.point[: self.frames]

    @property
    def trajectory(self) -> Trajectory:
        return self._prepared[0]

    @property
    def conditions(self) -> torch.Tensor:
        return self._prepared[1]

    @property
    def _prepared(self) -> tuple[Trajectory, torch.Tensor]:
        if self._beginning is None:
            raise RuntimeError("the flow is not prepared yet")
        return self._beginning

    def prepare(self, solver: Solver) -> None:
        """Prepare the first step, on the thread of the step. Later calls do nothing."""
        if self._beginning is None:
            start, conditions = self.begin()
            self._beginning = Trajectory(solver, start), conditions


@dataclass(eq=False, slots=True)
class Vocoding:
    """The second part of a window's work: from the mel frames of its chunk to samples.

    mel: frames of the chunk, with at most FIELD frames before it and `ahead_frames` after it. sounded: number of frames of the chunk that
    have become samples or are not wanted. needless: number of samples at the beginning of `samples` that are not wanted. wanted_frames:
    number of wanted frames of the chunk. needs: first code that another replica would need to go on after the chunk. last: whether the
    speech ends with the chunk."""

    mel: torch.Tensor
    chunk: int
    ahead_frames: int
    sounded: int
    needless: int
    wanted_frames: int
    needs: int
    last: bool
    samples: list[torch.Tensor] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.sounded == self.chunk

    def piece(self) -> tuple[int, int, int, int]:
        """The next piece of sound, as four indices in `mel`: the first frame on which it depends, its first frame, the end of its frames,
        and the end of the frames on which it depends."""
        chunk_end = len(self.mel) - self.ahead_frames
        begin = chunk_end - self.chunk + self.sounded
        end = min(begin + PIECE_FRAMES, chunk_end)
        return max(begin - FIELD, 0), begin, end, min(end + FIELD, len(self.mel))


Job = Flow | Vocoding


class Windows:
    """Computes the jobs of windows; implements `Steps`."""

    def __init__(self, dit: Dit, vocoder: Vocoder, solver: Solver) -> None:
        self.dit, self.vocoder, self.solver = dit, vocoder, solver
        self.halved: Callable[[Hashable, float], None] = lambda key, seconds: None
        """Called after each step on two threads, with the key of its jobs and its seconds."""

    def key(self, job: Job) -> Hashable:
        """The shape of a job's next step; jobs with equal keys can be computed in one step."""
        if isinstance(job, Flow):
            if self._blocks(job) > SLICE_BLOCKS:
                return "slice", id(job)
            kept_end = 0 if job.state_out is None else job.context + job.chunk
            return "flow", job.frames, kept_end, job.state_in is not None
        first, begin, end, past = job.piece()
        return "sound", begin - first, end - begin, past - end

    def take(self, job: Job) -> None:
        """Does nothing, because a step has stored its results in the job."""

    def is_done(self, job: Job) -> bool:
        return job.done

    def give_up(self, job: Job) -> None:
        """Does nothing, because a job holds only its own memory."""

    def step(self, jobs: Sequence[Job], aside: Aside | None = None) -> None:
        """See Steps. jobs: with equal keys."""
        key, begin_s = self.key(jobs[0]), time.perf_counter()
        self._compute(jobs, aside)
        if aside is not None:
            self.halved(key, time.perf_counter() - begin_s)

    def _compute(self, jobs: Sequence[Job], aside: Aside | None) -> None:
        """Do the next step of the jobs, which are all flows or all vocodings."""
        flows = [job for job in jobs if isinstance(job, Flow)]
        with torch.inference_mode():
            for flow in flows:
                flow.prepare(self.solver)
            if flows and self._blocks(flows[0]) > SLICE_BLOCKS:
                self._evaluate_slice(flows[0], aside)
            elif flows:
                self._evaluate(flows, aside)
            else:
                self._sound([job for job in jobs if isinstance(job, Vocoding)], aside)

    def _evaluate(self, flows: Sequence[Flow], aside: Aside | None) -> None:
        """Evaluate the net once for each of these flows, which have equal keys."""
        first, evaluations = flows[0], [flow.trajectory.evaluation for flow in flows]
        states_in = [flow.state_in[evaluation] for flow, evaluation in zip(flows, evaluations, strict=True) if flow.state_in is not None]
        last_block = (first.context + first.chunk) // self.dit.config.block_frames - 1  # of the chunk
        slopes, state_out = self.dit.slopes(
            torch.stack([flow.trajectory.point for flow in flows]),
            torch.cat([flow.conditions for flow in flows]),
            evaluations,
            first.frames,
            torch.stack(states_in) if states_in else None,
            None if first.state_out is None else last_block,
            aside,
        )
        for place, (flow, evaluation) in enumerate(zip(flows, evaluations, strict=True)):
            if state_out is not None and flow.state_out is not None:
                flow.state_out[evaluation] = state_out[place]
            flow.trajectory.take(slopes[place])

    def _evaluate_slice(self, flow: Flow, aside: Aside | None) -> None:
        """Evaluate the next blocks of the only window of a speech, together with the neighbouring blocks on which they depend."""
        assert flow.state_in is None and flow.state_out is None
        block, first = self.dit.config.block_frames, len(flow.slopes) * SLICE_BLOCKS
        end, past = first + SLICE_BLOCKS, self._blocks(flow)
        begin = max(first - BACK_LAYERS, 0)
        span = slice(begin * block, min(end + AHEAD_LAYERS, past) * block)
        slopes, _ = self.dit.slopes(
            flow.trajectory.point[None, span],
            flow.conditions[:, span],
            [flow.trajectory.evaluation],
            min(flow.frames, span.stop) - span.start,
            None,
            None,
            aside,
        )
        part = slopes[0, (first - begin) * block : (end - begin) * block]
        if end < past:
            flow.slopes.append(part)
        else:
            flow.trajectory.take(torch.cat((*flow.slopes, part)))
            flow.slopes = []

    def _blocks(self, flow: Flow) -> int:
        return -(-flow.frames // self.dit.config.block_frames)

    def _sound(self, jobs: Sequence[Vocoding], aside: Aside | None) -> None:
        """Make the next piece of sound of each job. All jobs have equal keys."""
        pieces = [job.piece() for job in jobs]
        mel = torch.stack([job.mel[first:past] for job, (first, _, _, past) in zip(jobs, pieces, strict=True)])
        first, begin, end, past = pieces[0]
        sounds = self.vocoder.samples(mel, begin - first, past - end, aside).cpu()
        for job, samples in zip(jobs, sounds, strict=True):
            job.samples.append(samples.clone())
            job.sounded += end - begin


# The solver of the flow --------------------------------------------------------------------------------------------------------------


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
        # Place 1 gives `end` itself, because the sum could round to another number.
        return [
            end if place == 1 else begin + (end - begin) * place
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


# The trial at load -------------------------------------------------------------------------------------------------------------------


FLOW, VOCODER = "flow", "vocoder"


def form(window: Window | None) -> Hashable:
    """The form of a window; windows of equal form take equally long. None: there is no window, or it is the last window of a speech, which
    may have any length."""
    if window is None or window.last:
        return None
    return window.end - window.begin, window.context, window.ahead_codes, window.fresh, min(window.begin, FIELD)


class WindowTrials:
    """Implements `Trials` with random windows of one model."""

    form = staticmethod(form)
    halves = True

    def __init__(self, config: WaveConfig, windows: Windows) -> None:
        self._config, self._windows, self.shape = config, windows, windows.key
        self.device = windows.dit.device
        self.code_s = config.code_samples / config.sample_rate_hz
        self.stages: Mapping[str, int] = {FLOW: windows.solver.evaluations, VOCODER: 1}

    def random_job(self, stage: str, window: Window, seed: int) -> Job:
        """See Trials. A flow is before its first evaluation, a vocoding before its first sound."""
        config, dit, generator = self._config, self._windows.dit, torch.Generator().manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dit.device)

        repeats, mel, evaluations = config.dit.repeats, config.dit.mel_bins, self.stages[FLOW]
        frames, chunk, ahead_frames = (n * repeats for n in (window.past - window.first, window.end - window.begin, window.ahead_codes))
        if stage == VOCODER:
            before = 0 if window.fresh else min(FIELD, window.begin * repeats)
            mel_frames = random(before + frames, mel) - 5  # Mel frames are logarithms of amplitudes far below 1.
            return Vocoding(mel_frames, chunk, ahead_frames, sounded=0, needless=0, wanted_frames=chunk, needs=0, last=False)
        return Flow(
            context=window.context * repeats,
            chunk=chunk,
            ahead_frames=ahead_frames,
            begin=lambda: (random(frames, mel), random(2, frames, config.dit.hidden_size)),
            state_in=None if window.fresh else random(1, *dit.kept_shape()).expand(evaluations, *[-1] * len(dit.kept_shape())),
            state_out=torch.empty(evaluations, *dit.kept_shape(), device=dit.device),
        )

    def step(self, jobs: Sequence[Job], aside: Aside | None) -> list[torch.Tensor]:
        """See Trials. The result of a vocoding is its samples; the result of a flow is its point and the state that it leaves,
        flattened."""
        self._windows.step(jobs, aside)
        results = []
        for job in jobs:
            if isinstance(job, Vocoding):
                results.append(job.samples[-1])
            else:
                assert job.state_out is not None
                results.append(torch.cat((job.trajectory.point.flatten(), job.state_out[0].flatten())))
        return results
