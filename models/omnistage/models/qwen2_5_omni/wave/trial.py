"""Makes random windows of Qwen2.5-Omni, for the trial of its Code2Wav at load."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch

from omnistage.models.qwen2_5_omni.wave.config import WaveConfig
from omnistage.models.qwen2_5_omni.wave.vocoder import FIELD
from omnistage.models.qwen2_5_omni.wave.window import Flow, Job, Vocoding, Windows
from omnistage.models.speech.schedule import Window
from omnistage.models.steps.loop import Aside

FLOW, VOCODER = "flow", "vocoder"


def form(window: Window | None) -> Hashable:
    """The form of a window; windows of equal form take equally long. None: there is no window, or it is the last window of a speech, which
    may have any length."""
    if window is None or window.last:
        return None
    return window.end - window.begin, window.context, window.ahead, window.fresh, min(window.begin, FIELD)


class WindowTrials:
    """Implements `Trials` with the windows of one model."""

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
        frames, chunk, ahead_frames = (codes * repeats for codes in (window.past - window.first, window.end - window.begin, window.ahead))
        if stage == VOCODER:
            before = 0 if window.fresh else min(FIELD, window.begin * repeats)
            return Vocoding(random(before + frames, mel) - 5, chunk, ahead_frames, 0, 0, chunk, 0, last=False)
        return Flow(
            context=window.context * repeats,
            chunk=chunk,
            ahead=ahead_frames,
            begin=lambda: (random(frames, mel), random(2, frames, config.dit.hidden_size)),
            left=None if window.fresh else random(1, *dit.kept_shape()).expand(evaluations, *[-1] * len(dit.kept_shape())),
            leaves=torch.empty(evaluations, *dit.kept_shape(), device=dit.device),
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
                assert job.leaves is not None
                results.append(torch.cat((job.trajectory.point.flatten(), job.leaves[0].flatten())))
        return results
