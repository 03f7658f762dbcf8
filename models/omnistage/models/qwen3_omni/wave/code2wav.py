"""Code2Wav of Qwen3-Omni: makes sound from frames of codes while further frames are still being made, for many speeches at once.
`load_code2wav` builds it from the files of a checkpoint in the published layout. A Speech turns its frames into windows, and keeps the
state that each window leaves to the next window. Windows are computed from codes to samples in steps of many windows together."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Hashable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from omnistage.engine.linear import LinearMaker, build_exact
from omnistage.engine.memory import kernels_kept
from omnistage.models.checkpoint.files import name_of
from omnistage.models.checkpoint.revision import revision
from omnistage.models.checkpoint.weights import Weights
from omnistage.models.devices import hardware
from omnistage.models.interface import Array, BadRequest, Content, ModelInfo, Piece, PortSpec, Profile, Sound, Wanted, WaveRequest
from omnistage.models.options import LoadOptions
from omnistage.models.qwen3_omni.family import CODE2WAV
from omnistage.models.qwen3_omni.wave.config import SAMPLE_RATE_HZ, SCHEDULES, WaveConfig, read_wave_config, schedule_of
from omnistage.models.qwen3_omni.wave.net import CausalNet, WaveState
from omnistage.models.speech.code2wav import AUDIO, KERNELS, Trial, WindowedCode2Wav, round_alike, sessions_of, start_trial
from omnistage.models.speech.pace import Arrivals, Forecast
from omnistage.models.speech.schedule import Codes, Schedule, Window
from omnistage.models.speech.talker import codes_port
from omnistage.models.steps.loop import Aside, Loop
from omnistage.models.steps.orders import Listeners
from omnistage.models.worker import Worker, make_ahead


@dataclass(eq=False, slots=True)
class WindowJob:
    """The computation of a window. codes: int64 [frames, codebooks]. state: the state before the codes. silent: see CausalNet.step.
    samples: of the codes, float32 [samples]. after: the state after the codes. Both are None until the job is done."""

    codes: torch.Tensor
    state: WaveState
    silent: bool = False
    samples: torch.Tensor | None = None
    after: WaveState | None = None

    @property
    def results(self) -> tuple[torch.Tensor, WaveState]:
        """The samples and the state after the codes, once the job is done. Raises RuntimeError before."""
        if self.samples is None or self.after is None:
            raise RuntimeError("the window is not computed yet")
        return self.samples, self.after


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


# The trial at load -------------------------------------------------------------------------------------------------------------------


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
            state = replace(state, key_count=key_count, keys=random(state.keys), inputs=tuple(map(random, state.inputs)))
        return WindowJob(codes, state)

    def step(self, jobs: Sequence[WindowJob], aside: Aside | None) -> list[torch.Tensor]:
        """See Trials. The result of a job is its samples and the state after it, flattened."""
        self._windows.step(jobs, aside)
        results = []
        for job in jobs:
            samples, state = job.results
            tensors = (samples, state.keys, *state.inputs)
            results.append(torch.cat([each.flatten().cpu() for each in tensors]))
        return results


# A speech ----------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PreparedSpeech:
    """The parameters of a speech. schedule: cuts it into windows. has_listener: whether somebody listens while the sound is made."""

    schedule: Schedule
    has_listener: bool


class Speech:
    """Makes the windows of one speech from its frames, one after the other. Not safe to use from two threads at once.

    first_sample: the first sample that is wanted. Earlier frames are computed only as far back as the wanted samples depend on them, in the
    same windows as in the first run, so that all bits are the same. Windows far before that sample are silent: only attention needs
    them."""

    def __init__(self, config: WaveConfig, net: CausalNet, schedule: Schedule, first_sample: int = 0) -> None:
        self._config, self._schedule, self._first_sample = config, schedule, first_sample
        frame = first_frame(config, first_sample)
        self._number = schedule.entry(frame)
        self._sounding = schedule.begin(schedule.holding(frame)) - config.heard_frames
        """Number of the first frame that the convolutions of wanted sound see; windows before it are silent."""
        begin = schedule.first_code(self._number)
        self._codes = Codes(begin, config.codebooks)
        self._state = net.start(begin)
        self._has_ended = False

    def feed(self, first: int, codes: Array, *, last: bool) -> None:
        """Add the next frames, [n, codebooks]. first: number of the first of these frames in the speech; frames before the first needed
        frame are dropped. last: no more frames come. Raises BadRequest for codes outside the table, if needed frames were skipped, and for
        a speech that ends before `first_sample`."""
        frames = codes.astype(np.int64)
        if len(wrong := frames[frames >= self._config.codes]):
            raise BadRequest("codes", f"there is no code {wrong[0]}; codes are below {self._config.codes}")
        self._codes.add(first, frames)
        self._has_ended = self._has_ended or last
        samples = max(self._codes.end_frame * self._config.frame_samples - self._config.missing, 0)
        if self._has_ended and samples < self._first_sample:
            raise BadRequest("resume.positions", f"the sound has {samples} samples: it cannot go on at sample {self._first_sample}")

    def next(self) -> tuple[Window, WindowJob] | None:
        """The next window and its computation; None: some of its frames have not come, or the speech is over. Before that, call `finish`
        for the previous window."""
        window = self._schedule.window(self._number, self._codes.past, has_ended=self._has_ended)
        if window is None:
            return None
        codes = torch.from_numpy(self._codes.between(window.begin, window.end))
        return window, WindowJob(codes, self._state, silent=window.end <= self._sounding)

    def finish(self, window: Window, job: WindowJob) -> Sound:
        """The sound of the window that `next` returned last, without samples before `first_sample`, and with `Sound.needs`. job: that
        window, done."""
        samples, self._state = job.results
        begin_sample = max(job.state.place * self._config.frame_samples - self._config.missing, 0)
        self._number += 1
        self._codes.forget(window.end)
        needless = max(self._first_sample - begin_sample, 0)
        return Sound(samples[needless:, None].numpy(), self._schedule.first_code(self._schedule.entry(window.end)))


def first_frame(config: WaveConfig, sample: int) -> int:
    """The number of the frame with which a sample is made; it may be later than the sample's own frame: see `WaveConfig.missing`."""
    return (sample + config.missing) // config.frame_samples


class CausalCode2Wav(WindowedCode2Wav[PreparedSpeech]):
    """The Code2Wav of Qwen3-Omni; implements `Code2WavModel` with a net that looks back only. Build it with `load_code2wav`."""

    def __init__(
        self,
        config: WaveConfig,
        windows: Windows,
        workers: Sequence[Worker],
        schedules: Mapping[str, Schedule],
        info: ModelInfo,
        trial: Trial,
    ) -> None:
        super().__init__(info, Loop(windows, Listeners[WindowJob](trial.choose_batch_size, lambda key: False), workers), workers)
        self.config, self.windows, self._schedules = config, windows, schedules
        self._forecast = Forecast(1 / config.frame_rate_hz, trial.seconds, form)

    async def prepare(self, request: WaveRequest) -> PreparedSpeech:
        """See Code2WavModel.prepare. No voice is chosen, because the Talker's codes have a voice already."""
        return PreparedSpeech(self._schedules[request.profile], request.profile != Profile.OFFLINE)

    def first_frame(self, prepared: PreparedSpeech, sample: int) -> int:
        """See Code2WavModel.first_frame. The result is the first frame of a window, early enough for all sound from the sample on."""
        return prepared.schedule.first_code(prepared.schedule.entry(first_frame(self.config, sample)))

    async def decode(self, prepared: PreparedSpeech, inputs: AsyncIterator[Piece], ports: Wanted) -> AsyncGenerator[Sound, None]:
        """See Code2WavModel.decode. Without frames there is no sound. While the caller works with the sound of a window, the next is
        made."""
        speech = Speech(self.config, self.windows.net, prepared.schedule, ports[AUDIO])
        async with aclosing(make_ahead(self._sounds(speech, prepared, inputs))) as sounds:
            async for each in sounds:
                yield each

    async def _sounds(self, speech: Speech, prepared: PreparedSpeech, inputs: AsyncIterator[Piece]) -> AsyncGenerator[Sound, None]:
        """Yields the sound of each window. A first window is due at once, a later window when the listener has heard all sound before it;
        if nobody listens before the end, it is due after all windows with a listener."""
        clock, arrivals, due, has_sound = asyncio.get_running_loop().time, Arrivals(), 0.0, False
        async for piece in inputs:
            assert isinstance(piece.content, np.ndarray)
            arrivals.record(clock(), len(piece.content))
            speech.feed(piece.first, piece.content, last=piece.last)
            while (step := speech.next()) is not None:
                window, job = step
                due = due or (clock() if prepared.has_listener else math.inf)
                begin_s = clock()
                with self._forecast.watching(window, learning=window.begin > 0 and not job.silent):
                    await self._loop.run(job, due)
                sound, last = speech.finish(window, job), window.last
                del step, job
                if not len(sound.samples):
                    continue
                if not has_sound:
                    wait_s = 0.0 if last else self._forecast.prebuffer_s(prepared.schedule, arrivals, begin_s, clock())
                    sound, has_sound = replace(sound, prebuffer_s=wait_s), True
                yield sound
                due = max(clock(), due) + len(sound.samples) / SAMPLE_RATE_HZ

    def usual_codes(self, prepared: PreparedSpeech) -> Array:
        """See WindowedCode2Wav.usual_codes."""
        return np.zeros((sum(prepared.schedule.sizes) + prepared.schedule.sizes[-1], self.config.codebooks), np.uint32)


# Loading -----------------------------------------------------------------------------------------------------------------------------


CODE_REVISION = "2"
"""Part of the revision; raise it whenever the code could give other samples for equal input."""

PREFIX = "code2wav."
OTHERS = ("thinker.", "talker.")


def load_code2wav(folder: Path, options: LoadOptions) -> CausalCode2Wav:
    """Load a Code2Wav, try its windows on this machine, and start its threads. Raises LoadError."""
    config, wave_options, device = read_wave_config(folder), CODE2WAV.from_settings(options.family), torch.device(options.device)
    torch.set_num_threads(options.threads)
    round_alike(device)
    with kernels_kept(KERNELS):
        net, products = build_exact(partial(read_net, folder, config, device), torch.float32, device)
        windows = Windows(net)
    schedules = {name: schedule_of(sizes, config.frames_before) for name, sizes in SCHEDULES.items()}
    trial, workers = start_trial(WindowTrials(windows), schedules, "wave", wave_options.workers, options)
    # Twice, because a speech keeps the state before a window until the window is done, and then has the state after it too.
    sessions, reason = sessions_of(2 * windows.net.start(1).bytes, options)
    info = ModelInfo(
        name=name_of(folder) + "-code2wav",
        revision=revision(
            folder, CODE_REVISION, dtype="float32", device=hardware(options.device), threads=options.threads, results=trial.results
        ),
        accepts=(codes_port(config.codebooks, config.frame_rate_hz),),
        produces=(PortSpec(AUDIO, Content.AUDIO, rate_hz=SAMPLE_RATE_HZ, width=1),),
        max_sessions=sessions,
        draws=False,
        settings={"max_sessions": reason, "products": products, **trial.reasons},
    )
    return CausalCode2Wav(config, windows, workers, schedules, info, trial)


def read_net(folder: Path, config: WaveConfig, device: torch.device, linear: LinearMaker) -> CausalNet:
    """Read the net. Raises BadCheckpoint."""
    with Weights(folder, OTHERS) as weights, torch.inference_mode():

        def weight(name: str, shape: tuple[int, ...]) -> torch.Tensor:
            weights.check_shape(PREFIX + name, shape)
            return weights.need(PREFIX + name).float().to(device)

        net = CausalNet(config, weight, linear)
        weights.check_read()
    return net
