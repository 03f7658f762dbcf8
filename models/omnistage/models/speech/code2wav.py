"""The shared part of Code2Wavs that compute windows of many speeches in one loop of steps, on threads of their own: the settings that each
of them chooses at load, and a trial with random windows at load, which finds how many may be computed together, the results for fixed
input, and the speed."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Generic, Protocol, TypeVar

import torch

from omnistage.models.checkpoint.revision import compute_on_thread
from omnistage.models.devices import cores
from omnistage.models.interface import USUAL_PROFILE, Activity, Array, Load, ModelInfo, Piece, Sound, Wanted, WaveRequest, inputs_of
from omnistage.models.memory import free_bytes
from omnistage.models.options import LoadOptions
from omnistage.models.reports import bytes_told
from omnistage.models.speech.pace import WORTH, computing_s, speakers_text
from omnistage.models.speech.schedule import ALL_CODES, Schedule, Window
from omnistage.models.steps.loop import Aside, Loop
from omnistage.models.worker import Worker

AUDIO = "audio"

Prepared = TypeVar("Prepared")


class WindowedCode2Wav(ABC, Generic[Prepared]):
    """Implements the shared part of `Code2WavModel`. loop: makes the windows of all speeches. workers: the threads on which it computes."""

    def __init__(self, info: ModelInfo, loop: Loop[Any, float, None], workers: Sequence[Worker]) -> None:
        self.info, self._loop, self._workers = info, loop, workers
        self.threads: Sequence[Activity] = tuple(worker.activity for worker in workers)

    def load(self) -> Load:
        return self._loop.load

    @abstractmethod
    async def prepare(self, request: WaveRequest) -> Prepared:
        """See Code2WavModel.prepare."""

    @abstractmethod
    def decode(self, prepared: Prepared, inputs: AsyncIterator[Piece], ports: Wanted) -> AsyncGenerator[Sound, None]:
        """See Code2WavModel.decode."""

    @abstractmethod
    def usual_codes(self, prepared: Prepared) -> Array:
        """Codes for warming up, [frames, codebooks], enough for a window of each size."""

    async def warm_up(self) -> None:
        """Make sound from the usual codes, and drop it."""
        prepared = await self.prepare(WaveRequest(seed=0))
        (port,) = self.info.accepts
        async with aclosing(self.decode(prepared, inputs_of(Piece(port.name, 0, True, self.usual_codes(prepared))), {AUDIO: 0})) as sounds:
            async for _ in sounds:
                pass

    async def close(self) -> None:
        """End the threads. No session may be running."""
        for worker in self._workers:
            await worker.close()


USUAL_WORKERS = 4
"""Largest number of threads by default on a CPU. More threads would wait for Python's lock, which further replicas do not share."""

SESSIONS_SHARE = 0.2
"""Part of the free memory that may be taken by the state which speeches keep from window to window."""

KERNELS = 2048
"""Number of kernels that oneDNN keeps on a CPU, about 60 KB each. A net of convolutions has a hundred for each size of a window, and making
a kernel takes as long as using it once. With fewer, the kernels for the first window would be gone before the next speech needs them."""


def round_alike(device: torch.device) -> None:
    """Make torch always round in float32, and in the same way. The nets of Code2Wavs are published in float32, and if a window that is
    computed a second time had other bits, one would hear a click."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.deterministic = True


def workers_of(user_workers: int, options: LoadOptions, device: torch.device) -> int:
    """Number of threads that compute windows. user_workers: number that the user asked for; 0: the model chooses."""
    if user_workers or device.type != "cpu":
        return user_workers or 1
    return min(max(cores() // options.threads, 1), USUAL_WORKERS)


def sessions_of(session_bytes: int, options: LoadOptions, free: int | None = None) -> tuple[int, str]:
    """(number of speeches that fit into memory at once, the reason in words). session_bytes: bytes that a speech keeps from window to
    window. free: free bytes after the weights are loaded; None: measure them."""
    if options.max_sessions:
        return options.max_sessions, options.describe("max_sessions", options.max_sessions)
    room = free_bytes(options.device) if free is None else free
    sessions = min(max(int(SESSIONS_SHARE * room) // session_bytes, 1), options.sessions)
    return sessions, f"{sessions}, {bytes_told(session_bytes)} each, of {bytes_told(room)} that are free"


SIZES: Mapping[str, Sequence[int]] = {"cpu": (4, 2), "cuda": (16, 8, 4, 2)}
"""Numbers of windows that are tried together, by type of device; a CPU is busy with a few."""

SLOW_SECONDS = 0.2
"""If a step of one window takes more seconds, windows are computed one at a time, because one window keeps the machine busy."""

TRIAL_SECONDS = 6.0
"""Seconds of the trial; windows of a shape that was not tried by then are computed one at a time."""

TIMED = 3
"""Steps of one kind that are measured; the median counts."""

Job = TypeVar("Job")
"""A window at one stage of its computation."""


class Trials(Protocol[Job]):
    """The windows of a family, for the trial. code_s: seconds of sound of a code. stages: name of each stage of a window, in order ->
    number of its steps. halves: whether a step can leave half of itself to a second thread."""

    device: torch.device
    code_s: float
    stages: Mapping[str, int]
    halves: bool

    def form(self, window: Window) -> Hashable:
        """The form of a window; windows of equal form take equally long. It is not called for the last window of a speech."""

    def random_job(self, stage: str, window: Window, seed: int) -> Job:
        """A window of random values before the first step of a stage; equal seeds give equal values."""

    def shape(self, job: Job) -> Hashable:
        """The shape of a job; jobs of equal shape can be computed in one step. Jobs of two stages never have the same shape."""

    def step(self, jobs: Sequence[Job], aside: Aside | None) -> list[torch.Tensor]:
        """Do one step of jobs of equal shape; returns the result of each job. aside: another thread for half of the step; None: there is
        none."""


@dataclass(frozen=True, slots=True)
class Trial:
    """The results of a trial. together: stage -> shape -> numbers of windows above 1, descending, that have the same bits in one step as
    alone. halved: shape -> seconds of a step of one window on one thread, for the shapes with which two threads are faster and give the
    same bits. results: for fixed input. workers: number of threads. speakers: number of speeches that this machine can make in real time if
    it does nothing else. seconds: form of a window -> seconds that it takes alone on this machine."""

    together: Mapping[str, Mapping[Hashable, tuple[int, ...]]]
    halved: Mapping[Hashable, float]
    results: Sequence[torch.Tensor]
    workers: int
    speakers: float
    seconds: Mapping[Hashable, float]

    def choose_batch_size(self, shape: Hashable, waiting_count: int) -> int:
        """Number of windows of this shape to compute together. waiting_count: number of windows that wait."""
        sizes = next((by_shape[shape] for by_shape in self.together.values() if shape in by_shape), ())
        return next((size for size in sizes if size <= waiting_count), 1)

    @property
    def reasons(self) -> dict[str, str]:
        """Name of each setting -> its reason, for the user."""
        shapes = sum(map(len, self.together.values()))
        stages = "; ".join(f"{stage}: {_stage_text(list(sizes.values()))}" for stage, sizes in self.together.items())
        return {
            "batch": f"{stages}: what has the same bits together as alone",
            "workers": f"{self.workers}; two of them share a step in {len(self.halved)} of {shapes} shapes",
            "real_time_speakers": speakers_text(self.speakers),
        }


def _stage_text(shapes: Sequence[tuple[int, ...]]) -> str:
    """The results of one stage in words. shapes: for each shape, the numbers of windows that have the same bits together as alone."""
    exact = [max(sizes) for sizes in shapes if sizes]
    return f"up to {max(exact)} windows together, in {len(exact)} of {len(shapes)} shapes" if exact else "one window at a time"


def try_windows(trials: Trials[Job], schedules: Mapping[str, Schedule], workers: Sequence[Worker], *, max_windows: int = 0) -> Trial:
    """Run the trial: windows of all shapes that speeches have, on this thread and on the workers' threads. schedules: by name of the
    profile. max_windows: largest number of windows to compute together; 0: the largest number of SIZES."""
    side_by_side = min(len(workers), max(cores() // torch.get_num_threads(), 1))
    windows, deadline_s = _usual_windows(trials, schedules), time.monotonic() + TRIAL_SECONDS
    sizes: Sequence[int] = [size for size in SIZES[trials.device.type] if not max_windows or size <= max_windows]
    together = {stage: dict[Hashable, tuple[int, ...]]() for stage in trials.stages}
    halved, results, seconds = dict[Hashable, float](), list[torch.Tensor](), dict[Hashable, float]()
    for stage, exact_sizes in together.items():
        # A number that changes bits for one shape of a stage is not tried for the stage's other shapes.
        sizes_to_try = sizes
        for window in windows:
            trying = _Trying(trials, stage, window)
            shape = trying.shape
            if shape in exact_sizes:
                continue
            begin_s = time.monotonic()
            step_results = trying.step(1)
            now_s = time.monotonic()
            seconds[shape], exact_sizes[shape] = now_s - begin_s, ()
            results += step_results
            if now_s < deadline_s:
                # Measured anew, because the first run of a shape is slower.
                next_results, seconds[shape] = trying.step_alone(range(1, 1 + TIMED))
                if now_s - begin_s < SLOW_SECONDS:
                    exact_sizes[shape] = sizes_to_try = trying.exact(sizes_to_try, [*step_results, *next_results])
            if trials.halves and side_by_side > 1 and now_s < deadline_s:
                second_thread = _Clocked(workers[1])
                by_two_s = max(trying.seconds(1, second_thread.aside), second_thread.seconds())
                shared_results = trying.step(1, workers[1].aside)
                if by_two_s < WORTH * seconds[shape] and all(map(torch.equal, step_results, shared_results)):
                    halved[shape] = seconds[shape]
                    seconds[shape] = by_two_s
    form_seconds = {
        trials.form(window): sum(seconds[_Trying(trials, stage, window).shape] * steps for stage, steps in trials.stages.items())
        for window in windows
    }
    speakers = _speakers(trials, schedules[USUAL_PROFILE], together, workers, side_by_side)
    return Trial(together, halved, results, len(workers), speakers, form_seconds)


def start_trial(
    trials: Trials[Job], schedules: Mapping[str, Schedule], thread_name: str, user_workers: int, options: LoadOptions
) -> tuple[Trial, list[Worker]]:
    """Start the threads of a Code2Wav, and try its windows on them, as it will compute them. Returns the results and the threads.
    user_workers: see `workers_of`."""
    count = workers_of(user_workers, options, trials.device)
    workers = [Worker(f"{thread_name} {number}", options.threads) for number in range(count)]
    trial = partial(try_windows, trials, schedules, workers, max_windows=options.max_batch_size)
    return compute_on_thread(trial, options.threads), workers


def _usual_windows(trials: Trials[Job], schedules: Mapping[str, Schedule]) -> list[Window]:
    """One window of each form that speeches have, except last windows; windows of the usual profile come first."""
    by_form: dict[Hashable, Window] = {}
    for name in sorted(schedules, key=lambda name: name != USUAL_PROFILE):
        for number in range(schedules[name].cycle):
            window = schedules[name].window(number, ALL_CODES, has_ended=False)
            if window is not None:
                by_form.setdefault(trials.form(window), window)
    return list(by_form.values())


class _Trying(Generic[Job]):
    """Computes steps of random windows that have the sizes of `window`, at one of their stages."""

    def __init__(self, trials: Trials[Job], stage: str, window: Window) -> None:
        self._trials, self._stage, self._window = trials, stage, window
        self.shape = trials.shape(self._job(0))

    def _job(self, seed: int) -> Job:
        return self._trials.random_job(self._stage, self._window, seed)

    def step(self, size: int, aside: Aside | None = None) -> list[torch.Tensor]:
        """The result of one step of `size` windows."""
        return self._trials.step([self._job(number) for number in range(size)], aside)

    def step_alone(self, seeds: Iterable[int]) -> tuple[list[torch.Tensor], float]:
        """The result of each of these windows in a step of its own, and the median of the seconds of these steps."""
        results, times = list[torch.Tensor](), list[float]()
        for seed in seeds:
            result, step_s = self._timed([seed])
            results += result
            times.append(step_s)
        return results, median(times)

    def exact(self, sizes: Sequence[int], first_results: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """The numbers of windows, out of `sizes`, that have the same bits in one step as each window alone; descending. first_results: the
        results of the first windows."""
        seeds = range(len(first_results), max(sizes, default=0))
        further_results = self.step_alone(seeds)[0] if seeds else []
        expected = [*first_results, *further_results]
        return tuple(size for size in sizes if all(map(torch.equal, self.step(size), expected)))

    def seconds(self, size: int, aside: Aside | None = None) -> float:
        """Seconds of a step of `size` windows divided by `size`; the median of some steps."""
        return median(self._timed(range(size), aside)[1] for _ in range(TIMED)) / size

    def _timed(self, seeds: Iterable[int], aside: Aside | None = None) -> tuple[list[torch.Tensor], float]:
        """The results of a step of these windows, and the seconds that it computes."""
        jobs, kind = [self._job(seed) for seed in seeds], self._trials.device.type
        begin_s = computing_s(None, kind)
        results = self._trials.step(jobs, aside)
        return results, computing_s(None, kind) - begin_s


def _speakers(
    trials: Trials[Job],
    schedule: Schedule,
    together: Mapping[str, Mapping[Hashable, tuple[int, ...]]],
    workers: Sequence[Worker],
    side_by_side: int,
) -> float:
    """Seconds of sound that a second of computing makes on all workers at once, with windows from the middle of a long speech.
    side_by_side: number of workers that have a core at the same time."""
    window, speakers = schedule.window(schedule.growing, ALL_CODES, has_ended=False), list[float]()
    assert window is not None

    def measure() -> None:
        seconds = 0.0
        for stage, steps in trials.stages.items():
            trying = _Trying(trials, stage, window)
            sizes = together[stage].get(trying.shape) or (1,)
            seconds += trying.seconds(sizes[0]) * steps  # The first size is the largest.
        speakers.append((window.end - window.begin) * trials.code_s / seconds)

    for measuring in [worker.aside(measure) for worker in workers]:
        measuring.result()
    return sum(speakers) * side_by_side / len(workers)


class _Clocked:
    """Passes calls to a worker, and measures how long they compute."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._times = worker, list[float]()

    def aside(self, call: Callable[[], None]) -> Future[None]:
        """As `Worker.aside`, and records how long the call computes."""

        def timed() -> None:
            begin_s = computing_s(None, "cpu")
            call()
            self._times.append(computing_s(None, "cpu") - begin_s)

        return self._worker.aside(timed)

    def seconds(self) -> float:
        """The median of the seconds that the calls computed."""
        return median(self._times)
