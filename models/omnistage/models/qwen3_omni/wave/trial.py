"""Makes random windows of Qwen3-Omni, for the trial of its Code2Wav at load."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

import torch

from omnistage.models.qwen3_omni.wave.window import WindowJob, Windows
from omnistage.models.speech.schedule import Window
from omnistage.models.steps.loop import Aside

WINDOW = "window"


def form(window: Window) -> Hashable:
    """The form of a window; windows of equal form take equally long."""
    return window.end - window.begin, window.begin == 0


class WindowTrials:
    """Implements `Trials` with the windows of one model. A job is a window with random codes, and a random state unless it is the first."""

    form = staticmethod(form)
    halves = False
    stages: Mapping[str, int] = {WINDOW: 1}

    def __init__(self, windows: Windows) -> None:
        self._windows, self.shape = windows, windows.key
        self.device = windows.net.device
        self.code_s = 1 / windows.net.config.frame_rate_hz

    def random_job(self, stage: str, window: Window, seed: int) -> WindowJob:
        """See Trials."""
        config, generator = self._windows.net.config, torch.Generator().manual_seed(seed)

        def random(template: torch.Tensor) -> torch.Tensor:
            return torch.randn(template.shape, generator=generator).to(template)

        codes = torch.randint(config.codes, (window.end - window.begin, config.codebooks), generator=generator)
        state = self._windows.net.start(window.begin)
        if window.begin:
            # Random, because near the beginning of a speech some keys do not belong to frames.
            key_count = int(torch.randint(config.window, (), generator=generator))
            state = replace(state, seen=key_count, keys=random(state.keys), inputs=tuple(map(random, state.inputs)))
        return WindowJob(codes, state)

    def step(self, jobs: Sequence[WindowJob], aside: Aside | None) -> list[torch.Tensor]:
        """See Trials. The result of a job is its samples and the state after it, flattened."""
        self._windows.step(jobs, aside)
        results = []
        for job in jobs:
            assert job.after is not None and job.samples is not None
            tensors = (job.samples, job.after.keys, *job.after.inputs)
            results.append(torch.cat([each.flatten().cpu() for each in tensors]))
        return results
