"""What Code2Wav finds out about itself while it is loaded, with random windows: how many of them may be computed together, what it makes of
fixed input, and how fast it is."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch

from omnistage.models.qwen2_5_omni.wave.config import WaveConfig
from omnistage.models.qwen2_5_omni.wave.schedule import Schedule, Window
from omnistage.models.qwen2_5_omni.wave.solver import Trajectory
from omnistage.models.qwen2_5_omni.wave.vocoder import FIELD
from omnistage.models.qwen2_5_omni.wave.window import Job, Windows

SIZES: Mapping[str, Sequence[int]] = {"cpu": (4, 2), "cuda": (16, 8, 4, 2)}
"""Windows that may be computed together: a CPU has enough to do with few of them."""

SLOW_SECONDS = 0.2
"""Where one window takes longer, all are computed one at a time: a net that is so slow has enough to do with one."""

TRIAL_SECONDS = 6.0
"""Shapes that are not tried within it are computed one window at a time."""

PACED = "balanced"
"""The profile whose pace is told."""


@dataclass(frozen=True, slots=True)
class Trial:
    """together: of each shape of a step, how many windows of it have the same bits together as each has alone, descending; without 1.
    results: of fixed input. speakers: how many this machine can make speak in real time, if it does nothing else. seconds: that a window
    takes, by its form, in the same way."""

    together: Mapping[Hashable, tuple[int, ...]]
    results: Sequence[torch.Tensor]
    speakers: float
    seconds: Mapping[Hashable, float]

    def most(self, shape: Hashable, there: int) -> int:
        """How many of the windows that are there are computed together."""
        return next((size for size in self.together.get(shape, ()) if size <= there), 1)

    @property
    def why(self) -> dict[str, str]:
        """In words, by name of the setting."""
        return {
            "batch": f"flow: {self._told('flow')}; vocoder: {self._told('sound')}: what has the same bits together as alone",
            "real_time_speakers": f"{self.speakers:.1f}, measured, with nothing else on this machine",
        }

    def _told(self, part: str) -> str:
        sizes = [max(sizes, default=1) for shape, sizes in self.together.items() if isinstance(shape, tuple) and shape[0] == part]
        if max(sizes) == 1:
            return "one window at a time"
        exact = [size for size in sizes if size > 1]
        return f"up to {max(exact)} windows together, in {len(exact)} of {len(sizes)} shapes"


def tried(config: WaveConfig, windows: Windows, schedules: Mapping[str, Schedule], most: int = 0) -> Trial:
    """Compute windows of all shapes that streams have, on this thread. most: together; 0: as many as are worth it."""
    usual, ends = _usual(schedules), time.monotonic() + TRIAL_SECONDS
    sizes: Sequence[int] = [size for size in SIZES[windows.dit.device.type] if not most or size <= most]
    together, results, seconds = dict[Hashable, tuple[int, ...]](), [], dict[Hashable, float]()
    for flows in (True, False):
        # What the sizes are for: if none is exact for a shape of the flow or of the sound, there is none for the others.
        worth = sizes
        for window in usual:
            job = _job(config, windows, window, 0, flows=flows)
            if (shape := windows.shape(job)) in together:
                continue
            begun = time.monotonic()
            results += _made(windows, [job])
            now = time.monotonic()
            seconds[shape], together[shape] = now - begun, ()
            if now < ends and now - begun < SLOW_SECONDS:
                # The first run of a shape is not like the others.
                seconds[shape] = _seconds(config, windows, window, 1, flows=flows)
                together[shape] = worth = tuple(_exact(config, windows, window, worth, flows=flows))
    paced = {
        form(window): sum(
            seconds[windows.shape(_job(config, windows, window, 0, flows=flows))] * (windows.solver.evaluations if flows else 1)
            for flows in (True, False)
        )
        for window in usual
    }
    return Trial(together, results, _speakers(config, windows, schedules[PACED], together), paced)


def form(window: Window | None) -> Hashable:
    """What windows have in common that take equally long; that of the last one of a speech is like no other."""
    if window is None or window.last:
        return None
    return window.end - window.begin, window.context, window.ahead, window.fresh, min(window.begin, FIELD)


def _usual(schedules: Mapping[str, Schedule]) -> list[Window]:
    """One window of each form that a speech has but for its last; those of the paced profile first."""
    found: dict[Hashable, Window] = {}
    for name in sorted(schedules, key=lambda name: name != PACED):
        for number in range(schedules[name].cycle):
            window = schedules[name].window(number, 1 << 62, ended=False)
            if window is not None:
                found.setdefault(form(window), window)
    return list(found.values())


def _job(config: WaveConfig, windows: Windows, window: Window, seed: int, *, flows: bool) -> Job:
    """A window of random values, before its first evaluation, or before its sound."""
    dit, generator = windows.dit, torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dit.device)

    repeats, mel, evaluations = config.dit.repeats, config.dit.mel_bins, windows.solver.evaluations
    frames = (window.past - window.first) * repeats
    job = Job(
        context=window.context * repeats,
        chunk=(window.end - window.begin) * repeats,
        ahead=window.ahead * repeats,
        trajectory=Trajectory(windows.solver, random(frames, mel)),
        conditions=random(2, frames, config.dit.hidden_size),
        left=None if window.fresh else random(1, *dit.kept_shape()).expand(evaluations, *[-1] * len(dit.kept_shape())),
        leaves=torch.empty(evaluations, *dit.kept_shape(), device=dit.device),
        before=random(0 if window.fresh else min(FIELD, window.begin * repeats), mel),
    )
    if not flows:
        job.mel = torch.cat((job.before, job.trajectory.point - 5))
    return job


def _made(windows: Windows, jobs: Sequence[Job]) -> list[torch.Tensor]:
    """What one step makes of each."""
    windows.step(jobs)
    made = []
    for job in jobs:
        if job.samples:
            made.append(job.samples[-1])
        else:
            assert job.leaves is not None
            made.append(torch.cat((job.trajectory.point.flatten(), job.leaves[0].flatten())))
    return made


def _exact(config: WaveConfig, windows: Windows, window: Window, sizes: Sequence[int], *, flows: bool) -> tuple[int, ...]:
    """Those of the sizes at which each window has the bits that it has alone."""
    if not sizes:
        return ()
    alone = [_made(windows, [_job(config, windows, window, number, flows=flows)])[0] for number in range(sizes[0])]
    exact = []
    for size in sizes:
        jobs = [_job(config, windows, window, number, flows=flows) for number in range(size)]
        if all(map(torch.equal, _made(windows, jobs), alone)):
            exact.append(size)
    return tuple(exact)


def _speakers(config: WaveConfig, windows: Windows, schedule: Schedule, together: Mapping[Hashable, tuple[int, ...]]) -> float:
    """Seconds of sound that a second of computing makes, of windows as they are in the middle of a long speech."""
    window = schedule.window(schedule.growing, 1 << 62, ended=False)
    assert window is not None
    seconds = 0.0
    for flows in (True, False):
        size = next(iter(together.get(windows.shape(_job(config, windows, window, 0, flows=flows)), ())), 1)
        seconds += _seconds(config, windows, window, size, flows=flows) * (windows.solver.evaluations if flows else 1)
    return (window.end - window.begin) * config.code_samples / config.sample_rate_hz / seconds


def _seconds(config: WaveConfig, windows: Windows, window: Window, size: int, *, flows: bool) -> float:
    """That a step of so many windows takes for each of them, the median of three."""
    times = []
    for _ in range(3):
        jobs = [_job(config, windows, window, number, flows=flows) for number in range(size)]
        begun = time.perf_counter()
        _made(windows, jobs)
        times.append((time.perf_counter() - begun) / size)
    return sorted(times)[1]
