"""One window of a speech on its way from codes to samples, and the step that many windows take together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from omnistage.models.qwen3_omni.wave.net import CausalNet
from omnistage.models.qwen3_omni.wave.state import WaveState
from omnistage.models.steps.interface import Aside


@dataclass(eq=False, slots=True)
class WindowJob:
    """A window. codes: int64 [frames, codebooks]. state: the state before them. silent: see CausalNet.step. samples, after: the sound of
    the codes and the state after them; None until the job is done."""

    codes: torch.Tensor
    state: WaveState
    silent: bool = False
    samples: torch.Tensor | None = None
    after: WaveState | None = None


class Windows:
    """Implements `Steps` for windows, each of which is one step."""

    def __init__(self, net: CausalNet) -> None:
        self.net = net

    def key(self, job: WindowJob) -> Hashable:
        """The shape of a job: jobs with equal keys can step together, wherever in their speeches they are; but a first frame has a shape of
        its own."""
        return len(job.codes), job.state.place == 0, job.silent

    def step(self, jobs: Sequence[WindowJob], aside: Aside | None = None) -> None:
        """See Steps. jobs: of one key. aside: not used."""
        with torch.inference_mode():
            codes = torch.stack([job.codes for job in jobs]).to(self.net.device)
            made, after = self.net.step(codes, [job.state for job in jobs], silent=jobs[0].silent)
            samples = made.cpu()
        for job, own, state in zip(jobs, samples, after, strict=True):
            job.samples, job.after = own.clone(), state

    def take(self, job: WindowJob) -> None:
        """Nothing to do: the step has taken the job."""

    def is_done(self, job: WindowJob) -> bool:
        return job.after is not None

    def give_up(self, job: WindowJob) -> None:
        """Nothing to free: a job holds only its own memory."""
