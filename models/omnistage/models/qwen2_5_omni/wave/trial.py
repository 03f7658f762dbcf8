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

SIZES = (8, 4, 2)
"""Windows that may be computed together."""

SECONDS = 4.0
"""Where trying takes longer than this, what is left is computed one window at a time: a net that is so slow has enough to do with one."""

PACED = "balanced"
"""The profile whose pace is told."""


@dataclass(frozen=True, slots=True)
class Trial:
    """together: of each shape of a step, how many windows of it have the same bits together as each has alone, descending; without 1.
    results: of fixed input. speakers: how many this machine can make speak in real time, if it does nothing else."""

    together: Mapping[Hashable, tuple[int, ...]]
    results: Sequence[torch.Tensor]
    speakers: float

    def most(self, shape: Hashable, there: int) -> int:
        """How many of the windows that are there are computed together."""
        return next((size for size in self.together.get(shape, ()) if size <= there), 1)

    @property
    def why(self) -> dict[str, str]:
        """In words, by name of the setting."""
        sizes = {size for found in self.together.values() for size in found}
        tried = f"up to {max(sizes)} windows together" if sizes else "one window at a time"
        exact = sum(map(bool, self.together.values()))
        return {
            "batch": f"{tried}, in {exact} of {len(self.together)} shapes: those that have the same bits so",
            "real_time_speakers": f"{self.speakers:.1f}, measured, with nothing else on this machine",
        }


def tried(config: WaveConfig, windows: Windows, schedules: Mapping[str, Schedule]) -> Trial:
    """Compute windows of all shapes that streams have, on this thread."""
    shapes = {windows.shape(job): window for window in _usual(schedules) for job in _both(config, windows, window)}
    together, results, ends = dict[Hashable, tuple[int, ...]](), [], time.monotonic() + SECONDS
    for shape, window in shapes.items():
        jobs = [_job(config, windows, window, number, flows=_flows(shape)) for number in range(SIZES[0])]
        results += _made(windows, jobs[:1])
        together[shape] = _exact(config, windows, window, jobs, shape) if time.monotonic() < ends else ()
    return Trial(together, results, _speakers(config, windows, schedules[PACED], together))


def _usual(schedules: Mapping[str, Schedule]) -> list[Window]:
    """One window of each form that a speech has but for its last."""
    found: dict[tuple[object, ...], Window] = {}
    for schedule in schedules.values():
        for number in range(schedule.cycle):
            window = schedule.window(number, 1 << 62, ended=False)
            if window is not None:
                found.setdefault((window.end - window.begin, window.context, window.ahead, window.fresh), window)
    return list(found.values())


def _flows(shape: Hashable) -> bool:
    return isinstance(shape, tuple) and shape[0] == "flow"


def _both(config: WaveConfig, windows: Windows, window: Window) -> list[Job]:
    return [_job(config, windows, window, 0, flows=flows) for flows in (True, False)]


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


def _exact(config: WaveConfig, windows: Windows, window: Window, jobs: Sequence[Job], shape: Hashable) -> tuple[int, ...]:
    """The sizes at which each has the bits that it has alone. jobs: of which the first has made its step."""
    flows = _flows(shape)
    begun = _job(config, windows, window, 0, flows=flows)
    alone = [made for job in (begun, *jobs[1:]) for made in _made(windows, [job])]
    exact = []
    for size in SIZES:
        again = [_job(config, windows, window, number, flows=flows) for number in range(size)]
        if all(map(torch.equal, _made(windows, again), alone)):
            exact.append(size)
    return tuple(exact)


def _speakers(config: WaveConfig, windows: Windows, schedule: Schedule, together: Mapping[Hashable, tuple[int, ...]]) -> float:
    """Seconds of sound that a second of computing makes, of windows as they are in the middle of a long speech."""
    window = schedule.window(schedule.growing, 1 << 62, ended=False)
    assert window is not None
    seconds = 0.0
    for flows in (True, False):
        job = _job(config, windows, window, 0, flows=flows)
        size = next(iter(together.get(windows.shape(job), ())), 1)
        times = []
        for _ in range(3):
            jobs = [_job(config, windows, window, number, flows=flows) for number in range(size)]
            begun = time.perf_counter()
            _made(windows, jobs)
            times.append((time.perf_counter() - begun) / size)
        seconds += sorted(times)[1] * (windows.solver.evaluations if flows else 1)
    return (window.end - window.begin) * config.code_samples / config.sample_rate_hz / seconds
