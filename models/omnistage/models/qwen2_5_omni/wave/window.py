"""One window of a speech on its way from noise to samples, and the steps that many of them take together.

codes, voice --conditions--> noise --Flow: evaluations of the net, solver--> mel frames --Vocoding, piece by piece--> samples

The next window needs nothing but what the flow of this one leaves: it can begin while this one becomes sound.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch

from omnistage.models.common.worker import Aside
from omnistage.models.qwen2_5_omni.wave.dit import Dit
from omnistage.models.qwen2_5_omni.wave.solver import Solver, Trajectory
from omnistage.models.qwen2_5_omni.wave.vocoder import FIELD, Vocoder

PIECE_FRAMES = 144
"""Mel frames that become sound in one step at most: those of a chunk of the largest size that a schedule of a stream has."""


@dataclass(eq=False, slots=True)
class Flow:
    """A window, as far as it has come from noise to mel frames.

    context, chunk, ahead: frames before those that become sound, of these, and behind them. trajectory: of all of them, padded to whole
    blocks. conditions: of Dit.conditions, padded too. left: what the window before left, by evaluation, [evaluations, *Dit.kept_shape()].
    leaves: the same for the next window; None where there is none.
    """

    context: int
    chunk: int
    ahead: int
    trajectory: Trajectory
    conditions: torch.Tensor
    left: torch.Tensor | None
    leaves: torch.Tensor | None

    @property
    def frames(self) -> int:
        return self.context + self.chunk + self.ahead

    @property
    def done(self) -> bool:
        return self.trajectory.done

    @property
    def mel(self) -> torch.Tensor:
        """The solution, without padding, [frames, mel_bins]."""
        return self.trajectory.point[: self.frames]


@dataclass(eq=False, slots=True)
class Vocoding:
    """A chunk, as far as it has come from mel frames to samples.

    mel: of the chunk, with final frames before it, at most FIELD, and `ahead` behind. sounded: frames of the chunk that have become
    samples, or that nobody needs as sound; needless: of the samples, the first that nobody needs either. wanted_frames: frames of the
    chunk that somebody needs. needs: first code that a replacement needs to go on behind the chunk. last: the speech ends with it.
    """

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
        """What becomes sound next: the first frame of `mel` that is looked at, that which becomes sound, and where both end."""
        chunk = len(self.mel) - self.ahead - self.chunk
        begin = chunk + self.sounded
        end = min(begin + PIECE_FRAMES, chunk + self.chunk)
        return max(begin - FIELD, 0), begin, end, min(end + FIELD, len(self.mel))


Job = Flow | Vocoding


class Windows:
    """What a step is."""

    def __init__(self, dit: Dit, vocoder: Vocoder, solver: Solver) -> None:
        self.dit, self.vocoder, self.solver = dit, vocoder, solver

    def shape(self, job: Job) -> Hashable:
        """Those of equal shapes can step together."""
        if isinstance(job, Flow):
            return "flow", job.frames, job.context + job.chunk if job.leaves is not None else 0, job.left is not None
        first, begin, end, past = job.piece()
        return "sound", begin - first, end - begin, past - end

    def step(self, jobs: Sequence[Job], aside: Aside | None = None) -> None:
        """One step of jobs of one shape. aside: another thread, for half of an evaluation of the net. Where it raises, nothing has changed
        in any of the jobs."""
        flows = [job for job in jobs if isinstance(job, Flow)]
        with torch.inference_mode():
            if flows:
                self._evaluate(flows, aside)
            else:
                self._sound([job for job in jobs if isinstance(job, Vocoding)])

    def _evaluate(self, flows: Sequence[Flow], aside: Aside | None) -> None:
        one, at = flows[0], [flow.trajectory.evaluation for flow in flows]
        left = [flow.left[evaluation] for flow, evaluation in zip(flows, at, strict=True) if flow.left is not None]
        slopes, kept = self.dit.slopes(
            torch.stack([flow.trajectory.point for flow in flows]),
            torch.cat([flow.conditions for flow in flows]),
            at,
            one.frames,
            torch.stack(left) if left else None,
            None if one.leaves is None else (one.context + one.chunk) // self.dit.config.block_frames - 1,
            aside,
        )
        for place, (flow, evaluation) in enumerate(zip(flows, at, strict=True)):
            if kept is not None and flow.leaves is not None:
                flow.leaves[evaluation] = kept[place]
            flow.trajectory.take(slopes[place])

    def _sound(self, jobs: Sequence[Vocoding]) -> None:
        pieces = [job.piece() for job in jobs]
        mel = torch.stack([job.mel[first:past] for job, (first, _, _, past) in zip(jobs, pieces, strict=True)])
        first, begin, end, past = pieces[0]
        made = self.vocoder.samples(mel, begin - first, past - end).cpu()
        for job, samples in zip(jobs, made, strict=True):
            job.samples.append(samples.clone())
            job.sounded += end - begin
