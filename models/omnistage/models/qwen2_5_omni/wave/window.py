"""Computes windows of speeches, from noise to samples, in steps of many windows together.

codes, voice --conditions--> noise --Flow: evaluations of the net, solver--> mel frames --Vocoding, piece by piece--> samples

A window needs only the state that the flow of the previous window leaves, so it can begin while the previous window becomes sound."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch

from omnistage.models.qwen2_5_omni.wave.config import AHEAD_LAYERS, BACK_LAYERS
from omnistage.models.qwen2_5_omni.wave.dit import Dit
from omnistage.models.qwen2_5_omni.wave.solver import Solver, Trajectory
from omnistage.models.qwen2_5_omni.wave.vocoder import FIELD, Vocoder
from omnistage.models.steps.loop import Aside

SLICE_BLOCKS = 24
"""Largest number of blocks of a window that one step evaluates, because other windows wait for the step, and a signal to end the server
does too. Only windows of whole speeches have more blocks."""

PIECE_FRAMES = 144
"""Largest number of mel frames that become sound in one step: as many as the largest chunk of a streaming schedule has."""


@dataclass(eq=False, slots=True)
class Flow:
    """The first part of a window's work: from noise to mel frames.

    chunk: number of frames that become sound. context, ahead: numbers of frames before and after the chunk. begin: makes the noise, padded
    to whole blocks, and the conditions of Dit.conditions; the first step calls it, because both may be large. left: state of the previous
    window, [evaluations, *Dit.kept_shape()]; None: it needs no state. leaves: is filled with the state for the next window, in the same
    shape; None: no window needs it. slopes: if an evaluation takes several steps, the slopes of the blocks that are done."""

    context: int
    chunk: int
    ahead: int
    begin: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    left: torch.Tensor | None
    leaves: torch.Tensor | None
    slopes: list[torch.Tensor] = field(default_factory=list)
    _trajectory: Trajectory | None = None
    _conditions: torch.Tensor | None = None

    @property
    def frames(self) -> int:
        return self.context + self.chunk + self.ahead

    @property
    def done(self) -> bool:
        return self._trajectory is not None and self._trajectory.done

    @property
    def mel(self) -> torch.Tensor:
        """The solution, without padding, [frames, mel_bins]."""
        return self.trajectory.point[: self.frames]

    @property
    def trajectory(self) -> Trajectory:
        assert self._trajectory is not None, "before the first step"
        return self._trajectory

    @property
    def conditions(self) -> torch.Tensor:
        assert self._conditions is not None, "before the first step"
        return self._conditions

    def prepare(self, solver: Solver) -> None:
        """Prepare the first step, on the thread of the step. Later calls do nothing."""
        if self._trajectory is None:
            start, self._conditions = self.begin()
            self._trajectory = Trajectory(solver, start)


@dataclass(eq=False, slots=True)
class Vocoding:
    """The second part of a window's work: from the mel frames of its chunk to samples.

    mel: frames of the chunk, with at most FIELD frames before it and `ahead` after it. sounded: number of frames of the chunk that have
    become samples or are not wanted. needless: number of samples at the beginning of `samples` that are not wanted. wanted_frames: number
    of wanted frames of the chunk. needs: first code that another replica would need to go on after the chunk. last: whether the speech ends
    with the chunk."""

    mel: torch.Tensor
    chunk: int
    ahead: int
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
        chunk = len(self.mel) - self.ahead - self.chunk
        begin = chunk + self.sounded
        end = min(begin + PIECE_FRAMES, chunk + self.chunk)
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
            return "flow", job.frames, job.context + job.chunk if job.leaves is not None else 0, job.left is not None
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
        one, at = flows[0], [flow.trajectory.evaluation for flow in flows]
        states_in = [flow.left[evaluation] for flow, evaluation in zip(flows, at, strict=True) if flow.left is not None]
        slopes, state_out = self.dit.slopes(
            torch.stack([flow.trajectory.point for flow in flows]),
            torch.cat([flow.conditions for flow in flows]),
            at,
            one.frames,
            torch.stack(states_in) if states_in else None,
            None if one.leaves is None else (one.context + one.chunk) // self.dit.config.block_frames - 1,
            aside,
        )
        for place, (flow, evaluation) in enumerate(zip(flows, at, strict=True)):
            if state_out is not None and flow.leaves is not None:
                flow.leaves[evaluation] = state_out[place]
            flow.trajectory.take(slopes[place])

    def _evaluate_slice(self, flow: Flow, aside: Aside | None) -> None:
        """Evaluate the next blocks of the only window of a speech, together with the neighbouring blocks on which they depend."""
        assert flow.left is None and flow.leaves is None
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
