"""Computes windows of speeches, from codes to samples, in steps of many windows together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from omnistage.models.qwen3_omni.wave.net import CausalNet
from omnistage.models.qwen3_omni.wave.state import WaveState
from omnistage.models.steps.loop import Aside


@dataclass(eq=False, slots=True)
class WindowJob:
    """The computation of a window. codes: int64 [frames, codebooks]. state: the state before the codes. silent: see CausalNet.step.
    samples: of the codes, float32 [samples]. after: the state after the codes. Both are None until the job is done."""

    codes: torch.Tensor
    state: WaveState
    silent: bool = False
    samples: torch.Tensor | None = None
    after: WaveState | None = None


class Windows:
    """Computes windows, each in one step; implements `Steps`."""

    def __init__(self, net: CausalNet) -> None:
        self.net = net

    def key(self, job: WindowJob) -> Hashable:
        """The shape of a job; jobs with equal keys can be computed in one step, wherever they are in their speeches, except that first
        frames form a step of their own."""
        return len(job.codes), job.state.place == 0, job.silent

    def step(self, jobs: Sequence[WindowJob], aside: Aside | None = None) -> None:
        """See Steps. jobs: with equal keys. aside: not used."""
        with torch.inference_mode():
            codes = torch.stack([job.codes for job in jobs]).to(self.net.device)
            batch, after = self.net.step(codes, [job.state for job in jobs], silent=jobs[0].silent)
            samples = batch.cpu()
        for job, job_samples, state in zip(jobs, samples, after, strict=True):
            job.samples, job.after = job_samples.clone(), state

    def take(self, job: WindowJob) -> None:
        """Does nothing, because a step has stored its results in the job."""

    def is_done(self, job: WindowJob) -> bool:
        return job.after is not None

    def give_up(self, job: WindowJob) -> None:
        """Does nothing, because a job holds only its own memory."""
