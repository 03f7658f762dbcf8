"""What Code2Wav finds out about itself while it is loaded, with random windows: how many of them may be computed together, what it makes of
fixed input, and how fast it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import torch

from omnistage.models.common.cores import cores
from omnistage.models.common.real_time import computing_s, told
from omnistage.models.common.worker import Worker
from omnistage.models.interface import USUAL_PROFILE
from omnistage.models.qwen2_5_omni.wave.config import WaveConfig
from omnistage.models.qwen2_5_omni.wave.halving import WORTH
from omnistage.models.qwen2_5_omni.wave.schedule import Schedule, Window
from omnistage.models.qwen2_5_omni.wave.vocoder import FIELD
from omnistage.models.qwen2_5_omni.wave.window import Flow, Job, Vocoding, Windows
from omnistage.models.steps.interface import Aside

SIZES: Mapping[str, Sequence[int]] = {"cpu": (4, 2), "cuda": (16, 8, 4, 2)}
"""Windows that may be computed together: a CPU has enough to do with few of them."""

SLOW_SECONDS = 0.2
"""Where one window takes longer, all are computed one at a time: a net that is so slow has enough to do with one."""

TRIAL_SECONDS = 6.0
"""Shapes that are not tried within it are computed one window at a time."""


@dataclass(frozen=True, slots=True)
class Trial:
    """together: of each shape of a step, how many windows of it have the same bits together as each has alone, descending; without 1.
    halved: shapes of which one alone is made sooner by two threads, with the same bits, and the seconds that it takes one. results: of
    fixed input. workers: threads. speakers: how many this machine can make speak in real time, if it does nothing else. seconds: that a
    window takes which is alone, by its form, in the same way."""

    together: Mapping[Hashable, tuple[int, ...]]
    halved: Mapping[Hashable, float]
    results: Sequence[torch.Tensor]
    workers: int
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
            "workers": f"{self.workers}; two of them share a step in {len(self.halved)} of {len(self.together)} shapes",
            "real_time_speakers": told(self.speakers),
        }

    def _told(self, part: str) -> str:
        sizes = [max(sizes, default=1) for shape, sizes in self.together.items() if isinstance(shape, tuple) and shape[0] == part]
        if max(sizes) == 1:
            return "one window at a time"
        exact = [size for size in sizes if size > 1]
        return f"up to {max(exact)} windows together, in {len(exact)} of {len(sizes)} shapes"


def tried(config: WaveConfig, windows: Windows, schedules: Mapping[str, Schedule], workers: Sequence[Worker], most: int = 0) -> Trial:
    """Compute windows of all shapes that streams have, on this thread and on those of the workers. most: together; 0: as many as are worth
    it."""
    side_by_side = min(len(workers), max(cores() // torch.get_num_threads(), 1))
    usual, ends = _usual(schedules), time.monotonic() + TRIAL_SECONDS
    sizes: Sequence[int] = [size for size in SIZES[windows.dit.device.type] if not most or size <= most]
    together, halved, results, seconds = dict[Hashable, tuple[int, ...]](), dict[Hashable, float](), [], dict[Hashable, float]()
    for flows in (True, False):
        # What the sizes are for: if none is exact for a shape of the flow or of the sound, there is none for the others.
        worth = sizes
        for window in usual:
            job = _job(config, windows, window, 0, flows=flows)
            if (shape := windows.key(job)) in together:
                continue
            begun = time.monotonic()
            made = _made(windows, [job])
            now = time.monotonic()
            seconds[shape], together[shape] = now - begun, ()
            results += made
            if now < ends:
                # The first run of a shape is not like the others.
                seconds[shape] = _seconds(config, windows, window, 1, flows=flows)
            if now < ends and now - begun < SLOW_SECONDS:
                together[shape] = worth = tuple(_exact(config, windows, window, worth, flows=flows))
            if side_by_side > 1 and now < ends:
                other = _Clocked(workers[1])
                by_two_s = max(_seconds(config, windows, window, 1, flows=flows, aside=other.aside), other.seconds())
                again = _made(windows, [_job(config, windows, window, 0, flows=flows)], workers[1].aside)
                if by_two_s < WORTH * seconds[shape] and all(map(torch.equal, made, again)):
                    halved[shape] = seconds[shape]
                    seconds[shape] = by_two_s
    paced = {
        form(window): sum(
            seconds[windows.key(_job(config, windows, window, 0, flows=flows))] * (windows.solver.evaluations if flows else 1)
            for flows in (True, False)
        )
        for window in usual
    }
    speakers = _speakers(config, windows, schedules[USUAL_PROFILE], together, workers, side_by_side)
    return Trial(together, halved, results, len(workers), speakers, paced)


def form(window: Window | None) -> Hashable:
    """What windows have in common that take equally long; that of the last one of a speech is like no other."""
    if window is None or window.last:
        return None
    return window.end - window.begin, window.context, window.ahead, window.fresh, min(window.begin, FIELD)


def _usual(schedules: Mapping[str, Schedule]) -> list[Window]:
    """One window of each form that a speech has but for its last; those of the paced profile first."""
    found: dict[Hashable, Window] = {}
    for name in sorted(schedules, key=lambda name: name != USUAL_PROFILE):
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
    frames, chunk, ahead = (codes * repeats for codes in (window.past - window.first, window.end - window.begin, window.ahead))
    if not flows:
        before = 0 if window.fresh else min(FIELD, window.begin * repeats)
        return Vocoding(random(before + frames, mel) - 5, chunk, ahead, 0, 0, chunk, 0, last=False)
    return Flow(
        context=window.context * repeats,
        chunk=chunk,
        ahead=ahead,
        begin=lambda: (random(frames, mel), random(2, frames, config.dit.hidden_size)),
        left=None if window.fresh else random(1, *dit.kept_shape()).expand(evaluations, *[-1] * len(dit.kept_shape())),
        leaves=torch.empty(evaluations, *dit.kept_shape(), device=dit.device),
    )


def _made(windows: Windows, jobs: Sequence[Job], aside: Aside | None = None) -> list[torch.Tensor]:
    """What one step makes of each."""
    windows.step(jobs, aside)
    made = []
    for job in jobs:
        if isinstance(job, Vocoding):
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


def _speakers(
    config: WaveConfig,
    windows: Windows,
    schedule: Schedule,
    together: Mapping[Hashable, tuple[int, ...]],
    workers: Sequence[Worker],
    side_by_side: int,
) -> float:
    """Seconds of sound that a second of computing makes on all workers at once, of windows as they are in the middle of a long speech.
    side_by_side: so many of them there are cores for."""
    window, speakers = schedule.window(schedule.growing, 1 << 62, ended=False), list[float]()
    assert window is not None

    def measure() -> None:
        seconds = 0.0
        for flows in (True, False):
            size = next(iter(together.get(windows.key(_job(config, windows, window, 0, flows=flows)), ())), 1)
            seconds += _seconds(config, windows, window, size, flows=flows) * (windows.solver.evaluations if flows else 1)
        speakers.append((window.end - window.begin) * config.code_samples / config.sample_rate_hz / seconds)

    for measuring in [worker.aside(measure) for worker in workers]:
        measuring.result()
    return sum(speakers) * side_by_side / len(workers)


class _Clocked:
    """A worker, and how long it computes."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._times = worker, list[float]()

    def aside(self, call: Callable[[], None]) -> Future[None]:
        def timed() -> None:
            begun = computing_s(None, "cpu")
            call()
            self._times.append(computing_s(None, "cpu") - begun)

        return self._worker.aside(timed)

    def seconds(self) -> float:
        """Of a call, the median."""
        return sorted(self._times)[len(self._times) // 2]


def _seconds(config: WaveConfig, windows: Windows, window: Window, size: int, *, flows: bool, aside: Aside | None = None) -> float:
    """That a step of so many windows takes for each of them, the median of three."""
    times, clock = [], partial(computing_s, None, windows.dit.device.type)
    for _ in range(3):
        jobs = [_job(config, windows, window, number, flows=flows) for number in range(size)]
        begun = clock()
        _made(windows, jobs, aside)
        times.append((clock() - begun) / size)
    return sorted(times)[1]
