"""One window of a speech on its way from noise to samples, and the steps that many of them take together.

codes, voice --conditions--> noise --evaluations of the net, solver--> mel frames --vocoder, piece by piece--> samples
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch

from omnistage.models.qwen2_5_omni.wave.dit import Dit
from omnistage.models.qwen2_5_omni.wave.solver import Solver, Trajectory
from omnistage.models.qwen2_5_omni.wave.vocoder import FIELD, Vocoder

PIECE_FRAMES = 144
"""Mel frames that become sound in one step at most: those of a chunk of the largest size that a schedule of a stream has."""


@dataclass(eq=False, slots=True)
class Job:
    """A window, as far as it has come. All frames are mel frames.

    context, chunk, ahead: frames before those that become sound, of these, and behind them. trajectory: of all of them, padded to whole
    blocks. conditions: of Dit.conditions, padded too. left: what the window before left, by evaluation, [evaluations, *Dit.kept_shape()].
    leaves: the same for the next window; None where there is none. before: final frames before the window, at most FIELD. unheard: frames
    at the beginning of the chunk that nobody needs as sound.

    mel: the solution with what was `before`, once it is there. sounded: frames of the chunk that have become samples, or were skipped.
    """

    context: int
    chunk: int
    ahead: int
    trajectory: Trajectory
    conditions: torch.Tensor
    left: torch.Tensor | None
    leaves: torch.Tensor | None
    before: torch.Tensor
    unheard: int = 0
    mel: torch.Tensor | None = None
    sounded: int = 0
    samples: list[torch.Tensor] = field(default_factory=list)

    @property
    def frames(self) -> int:
        return self.context + self.chunk + self.ahead

    @property
    def done(self) -> bool:
        return self.mel is not None and self.sounded == self.chunk

    @property
    def final(self) -> torch.Tensor:
        """Final frames behind which the next window begins, at most FIELD."""
        assert self.mel is not None
        end = len(self.mel) - self.ahead
        return self.mel[max(end - FIELD, 0) : end]

    def solve(self, slope: torch.Tensor) -> None:
        """Go on with the slope at the trajectory's point."""
        self.trajectory.take(slope)
        if self.trajectory.done:
            self.mel = torch.cat((self.before, self.trajectory.point[: self.frames]))
            self.sounded = self.unheard

    def piece(self) -> tuple[int, int, int, int]:
        """What becomes sound next: the first frame of `mel` that is looked at, that which becomes sound, and where both end."""
        assert self.mel is not None
        chunk = len(self.mel) - self.ahead - self.chunk
        begin = chunk + self.sounded
        end = min(begin + PIECE_FRAMES, chunk + self.chunk)
        return max(begin - FIELD, 0), begin, end, min(end + FIELD, len(self.mel))


class Windows:
    """What a step is. between: called between two layers, so that a long step is not taken for one that hangs."""

    def __init__(self, dit: Dit, vocoder: Vocoder, solver: Solver, between: Callable[[], None]) -> None:
        self.dit, self.vocoder, self.solver, self._between = dit, vocoder, solver, between

    def shape(self, job: Job) -> Hashable:
        """Those of equal shapes can step together."""
        if job.mel is None:
            return "flow", job.frames, job.context + job.chunk if job.leaves is not None else 0, job.left is not None
        first, begin, end, past = job.piece()
        return "sound", begin - first, end - begin, past - end

    def step(self, jobs: Sequence[Job]) -> None:
        """One step of jobs of one shape. Where it raises, nothing has changed in any of them."""
        with torch.inference_mode():
            if jobs[0].mel is None:
                self._evaluate(jobs)
            else:
                self._sound(jobs)

    def _evaluate(self, jobs: Sequence[Job]) -> None:
        one, at = jobs[0], [job.trajectory.evaluation for job in jobs]
        left = [job.left[evaluation] for job, evaluation in zip(jobs, at, strict=True) if job.left is not None]
        slopes, kept = self.dit.slopes(
            torch.stack([job.trajectory.point for job in jobs]),
            torch.cat([job.conditions for job in jobs]),
            at,
            one.frames,
            torch.stack(left) if left else None,
            None if one.leaves is None else (one.context + one.chunk) // self.dit.config.block_frames - 1,
            self._between,
        )
        for place, (job, evaluation) in enumerate(zip(jobs, at, strict=True)):
            if kept is not None and job.leaves is not None:
                job.leaves[evaluation] = kept[place]
            job.solve(slopes[place])

    def _sound(self, jobs: Sequence[Job]) -> None:
        pieces = [job.piece() for job in jobs]
        mel = torch.stack([job.mel[first:past] for job, (first, _, _, past) in zip(jobs, pieces, strict=True) if job.mel is not None])
        first, begin, end, past = pieces[0]
        made = self.vocoder.samples(mel, begin - first, past - end).cpu()
        for job, samples in zip(jobs, made, strict=True):
            job.samples.append(samples.clone())
            job.sounded += end - begin
