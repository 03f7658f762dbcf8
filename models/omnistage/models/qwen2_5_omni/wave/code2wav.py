"""Code2Wav of Qwen2.5-Omni: makes sound from codes while further codes are still being made, for many speeches at once. `load_code2wav`
builds it from the files of a checkpoint in the published layout. A Speech turns its codes into windows, and keeps the state that the flow
of a window leaves to the next window. Each block of a speech has noise of its own, the same in every window."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from omnistage.engine.memory import kernels_kept
from omnistage.models.checkpoint.files import BadCheckpoint, name_of
from omnistage.models.checkpoint.header import bound_building
from omnistage.models.checkpoint.revision import revision
from omnistage.models.checkpoint.weights import Weights
from omnistage.models.devices import hardware
from omnistage.models.interface import Array, BadRequest, Content, ModelInfo, Piece, PortSpec, Sound, Wanted, WaveRequest
from omnistage.models.options import LoadOptions
from omnistage.models.qwen2_5_omni.family import CODE2WAV
from omnistage.models.qwen2_5_omni.voices import VoiceSizes, read_voices
from omnistage.models.qwen2_5_omni.wave.config import CODES_PORT, SCHEDULES, WaveConfig, read_wave_config, schedule_of
from omnistage.models.qwen2_5_omni.wave.dit import Dit, Speaker, example_net, speaker_of
from omnistage.models.qwen2_5_omni.wave.vocoder import FIELD, Vocoder
from omnistage.models.qwen2_5_omni.wave.window import PIECE_FRAMES, Flow, Job, Solver, Vocoding, Windows, WindowTrials, form
from omnistage.models.requests import choose_voice
from omnistage.models.speech.code2wav import AUDIO, KERNELS, Trial, WindowedCode2Wav, round_alike, sessions_of, start_trial
from omnistage.models.speech.pace import Arrivals, Forecast, Halving
from omnistage.models.speech.schedule import Codes, Schedule, Window
from omnistage.models.steps.loop import Loop
from omnistage.models.steps.orders import Listeners
from omnistage.models.worker import Worker, make_ahead


def noise(seed: int, first: int, blocks: int, frames: int, width: int) -> torch.Tensor:
    """Standard normal noise of consecutive blocks, float32 [blocks * frames, width], on the CPU. seed: 64 bits. first: number of the first
    block in its speech. frames: frames of a block."""
    # An array, because NumPy would convert a tuple by way of floating point, which rounds seeds above 2^53.
    keys = (np.array((seed, block), np.uint64) for block in range(first, first + blocks))
    arrays = [np.random.Generator(np.random.Philox(key=key)).standard_normal((frames, width), np.float32) for key in keys]
    return torch.from_numpy(np.concatenate(arrays))


@dataclass(frozen=True, slots=True)
class PreparedSpeech:
    """The seed, schedule and speaker of a speech."""

    seed: int
    schedule: Schedule
    speaker: Speaker


class Speech:
    """Makes the windows of one speech from its codes, one after the other. Not safe to use from two threads at once. first_sample: the
    first sample that is wanted; earlier samples are computed only if later samples depend on them."""

    def __init__(self, config: WaveConfig, windows: Windows, prepared: PreparedSpeech, first_sample: int = 0) -> None:
        self._config, self._windows, self._prepared = config, windows, prepared
        self._first_sample = first_sample
        self._number = prepared.schedule.entry(first_sample // config.code_samples)
        self._codes = Codes(prepared.schedule.first_code(self._number), 1)
        self._has_ended = self._over = False  # whether all codes have come; whether the last window was solved
        self._state: torch.Tensor | None = None
        """The state that the last window left to the next window; see Flow."""
        self._before = torch.zeros(0, config.dit.mel_bins, device=windows.dit.device)
        """The last mel frames before the next window, which the vocoder needs, [n, mel_bins]."""

    def feed(self, first: int, codes: Array, *, last: bool) -> None:
        """Add the next codes, [n, 1]. first: number of the first of these codes in the speech; codes before the first needed code are
        dropped. last: no more codes come. Raises BadRequest for codes outside the table, if needed codes were skipped, and for a speech
        that ends before `first_sample`."""
        if not self._has_ended:
            self._take(first, codes.astype(np.int64))
        self._has_ended = self._has_ended or last
        samples = self._codes.end_frame * self._config.code_samples
        if self._has_ended and samples < self._first_sample:
            raise BadRequest("resume.positions", f"the sound has {samples} samples: it cannot go on at sample {self._first_sample}")

    def next(self) -> tuple[Window, Flow] | None:
        """The next window and its flow; None: some of its codes have not come, or the speech is over. Before that, call `solved` for the
        previous window."""
        if self._over:
            return None
        window = self._prepared.schedule.window(self._number, self._codes.past, has_ended=self._has_ended)
        return None if window is None else (window, self._flow(window))

    def solved(self, window: Window, flow: Flow) -> Vocoding:
        """The next step of the window that `next` returned last: its mel frames, to be made into sound. flow: that window's flow, done."""
        schedule, mel = self._prepared.schedule, torch.cat((self._before, flow.mel))
        end = len(mel) - flow.ahead_frames
        self._state, self._before = flow.state_out, mel[max(end - FIELD, 0) : end]
        needless_samples = self._first_sample - schedule.begin(self._number) * self._config.code_samples  # of this chunk, if above 0
        self._number += 1
        self._over = flow.state_out is None
        self._codes.forget(schedule.first_code(self._number))
        unheard_frames = max(min(needless_samples // self._config.vocoder.frame_samples, flow.chunk), 0)
        if unheard_frames < flow.chunk:  # Only whole pieces are left out, because samples of a shorter piece may have other bits.
            unheard_frames -= unheard_frames % PIECE_FRAMES
        return Vocoding(
            mel,
            flow.chunk,
            flow.ahead_frames,
            unheard_frames,
            wanted_frames=flow.chunk - unheard_frames,
            needless=max(needless_samples - unheard_frames * self._config.vocoder.frame_samples, 0),
            needs=schedule.first_code(schedule.entry(window.end)),
            last=self._over,
        )

    def _take(self, first: int, codes: NDArray[np.int64]) -> None:
        """Add codes, up to a code that ends the speech. See `feed`."""
        ends = np.flatnonzero(np.isin(codes, self._config.ends))
        if len(ends):
            codes, self._has_ended = codes[: ends[0]], True
        if len(wrong := codes[codes >= self._config.dit.code_rows]):
            raise BadRequest("codes", f"there is no code {wrong[0]}; codes are below {self._config.dit.code_rows}")
        self._codes.add(first, codes)
        max_codes = self._config.dit.max_frames // self._config.dit.repeats
        if not self._prepared.schedule.sizes and self._codes.end_frame > max_codes:
            raise BadRequest("code2wav.profile", f"offline makes at most {max_codes} codes into sound: ask for another profile")

    def _flow(self, window: Window) -> Flow:
        """The flow of a window. The flow makes its noise and conditions when it begins."""
        config, dit, prepared = self._config.dit, self._windows.dit, self._prepared
        codes = torch.from_numpy(self._codes.between(window.first, window.past)[:, 0])
        first_block, blocks = window.first // self._config.block_codes, -(-len(codes) // self._config.block_codes)

        def begin() -> tuple[torch.Tensor, torch.Tensor]:
            start = noise(prepared.seed, first_block, blocks, config.block_frames, config.mel_bins)
            return start.to(dit.device), dit.conditions(codes.to(dit.device), prepared.speaker, blocks)

        if window.fresh:  # It uses nothing of the windows before it.
            self._state, self._before = None, self._before[:0]
        return Flow(
            context=window.context * config.repeats,
            chunk=(window.end - window.begin) * config.repeats,
            ahead_frames=window.ahead_codes * config.repeats,
            begin=begin,
            state_in=self._state,
            state_out=None if window.last else torch.empty(self._windows.solver.evaluations, *dit.kept_shape(), device=dit.device),
        )


def sound(vocoding: Vocoding) -> Sound:
    """The sound of a chunk, without the samples that are not wanted."""
    samples = torch.cat(vocoding.samples) if vocoding.samples else torch.zeros(0)
    return Sound(samples[vocoding.needless :, None].numpy(), vocoding.needs)


class FlowCode2Wav(WindowedCode2Wav[PreparedSpeech]):
    """The Code2Wav of Qwen2.5-Omni; implements `Code2WavModel` with a flow and a vocoder. Build it with `load_code2wav`."""

    def __init__(
        self,
        config: WaveConfig,
        windows: Windows,
        workers: Sequence[Worker],
        schedules: Mapping[str, Schedule],
        speakers: Mapping[str, Speaker],
        info: ModelInfo,
        trial: Trial,
    ) -> None:
        self.config, self.windows = config, windows
        self._schedules, self._speakers = schedules, speakers
        self._halving = Halving(trial.halved)
        windows.halved = self._halving.took
        super().__init__(info, Loop(windows, Listeners[Job](trial.choose_batch_size, self._halving.worth), workers), workers)
        self._forecast = Forecast(config.code_samples / config.sample_rate_hz, trial.seconds, form)

    async def prepare(self, request: WaveRequest) -> PreparedSpeech:
        """See Code2WavModel.prepare."""
        voice = choose_voice(self._speakers, request.voice, "code2wav.voice")
        return PreparedSpeech(request.seed, self._schedules[request.profile], self._speakers[voice])

    def first_frame(self, prepared: PreparedSpeech, sample: int) -> int:
        """See Code2WavModel.first_frame: the first frame that the last refreshed window before the sample needs."""
        schedule = prepared.schedule
        return schedule.first_code(schedule.entry(sample // self.config.code_samples))

    async def decode(self, prepared: PreparedSpeech, inputs: AsyncIterator[Piece], ports: Wanted) -> AsyncGenerator[Sound, None]:
        """See Code2WavModel.decode. Without codes there is no sound. While the caller works with the sound of a window, the sound of the
        next window is made, and the flow of the window after that is solved."""
        arrivals, speech = Arrivals(), Speech(self.config, self.windows, prepared, ports[AUDIO])
        async with (
            aclosing(make_ahead(self._solved(speech, prepared, inputs, arrivals))) as solved,
            aclosing(make_ahead(self._sounds(prepared.schedule, solved, arrivals))) as sounds,
        ):
            async for each in sounds:
                yield each

    async def _solved(
        self, speech: Speech, prepared: PreparedSpeech, inputs: AsyncIterator[Piece], arrivals: Arrivals
    ) -> AsyncGenerator[tuple[float, Vocoding], None]:
        """Solves the flow of each window. Yields (time, chunk): the chunk that is to become sound, and the time of the loop's clock at
        which the listener will have heard all sound before it; for a first chunk, now."""
        clock, due, has_sound = asyncio.get_running_loop().time, 0.0, False
        async for piece in inputs:
            assert isinstance(piece.content, np.ndarray)
            arrivals.record(clock(), len(piece.content))
            speech.feed(piece.first, piece.content, last=piece.last)
            while (step := speech.next()) is not None:
                window, flow = step
                # A client that wants the whole speech at once does not listen before its end, so its sound is due after all other sound.
                due = due or (clock() if prepared.schedule.sizes else math.inf)
                # The sound of the window before this one is made at the same time, so the slower of the two sets the pace of windows.
                with self._forecast.watching(window, learning=flow.state_in is not None):
                    await self._loop.run(flow, due)
                vocoding = speech.solved(window, flow)
                if not has_sound:
                    # The listener waits for the first sound, so nothing else of the speech is computed before it.
                    await self._loop.run(vocoding, due)
                    has_sound = True
                del step, flow
                yield due, vocoding
                due = max(clock(), due) + vocoding.wanted_frames * self.config.vocoder.frame_samples / self.config.sample_rate_hz

    async def _sounds(
        self, schedule: Schedule, solved: AsyncIterator[tuple[float, Vocoding]], arrivals: Arrivals
    ) -> AsyncGenerator[Sound, None]:
        """Yields the sound of the chunks that `_solved` yields; the first Sound has its `prebuffer_s`."""

        begin_s: float | None = None
        async for due, vocoding in solved:
            if not vocoding.done:
                await self._loop.run(vocoding, due)
            piece, last = sound(vocoding), vocoding.last
            del vocoding
            if not len(piece.samples):
                continue
            if begin_s is None:
                begin_s, now_s = due, asyncio.get_running_loop().time()
                piece = replace(piece, prebuffer_s=0.0 if last else self._forecast.prebuffer_s(schedule, arrivals, begin_s, now_s))
            yield piece

    def usual_codes(self, prepared: PreparedSpeech) -> Array:
        """See WindowedCode2Wav.usual_codes. The chunks of SCHEDULES have less than four blocks on average."""
        return np.zeros((len(prepared.schedule.sizes) * 4 * self.config.block_codes, 1), np.uint32)


# Loading -----------------------------------------------------------------------------------------------------------------------------


CODE_REVISION = "2"
"""Part of the revision; raise it whenever the code could give other samples for equal input."""

STEPS = 9
"""Number of steps of the solver, as published."""

FLOAT_BYTES = 4

_PREFIX = "token2wav.code2wav_dit_model."
_VOCODER = "token2wav.code2wav_bigvgan_model."
_EXAMPLE = f"{_PREFIX}input_embed.spk_encoder."
_OTHERS = ("thinker.", "talker.")


def load_code2wav(folder: Path, options: LoadOptions) -> FlowCode2Wav:
    """Load a Code2Wav, try its windows on this machine, and start its threads. Raises LoadError."""
    config, wave_options, device = read_wave_config(folder), CODE2WAV.from_settings(options.family), torch.device(options.device)
    torch.set_num_threads(options.threads)
    round_alike(device)
    solver = Solver.of(wave_options.solver, wave_options.steps or STEPS)
    with kernels_kept(KERNELS):
        windows, speakers = read_parts(folder, config, solver, device)
    schedules = {
        name: schedule_of(sizes, wave_options.lookahead or blocks_ahead, config.block_codes)
        for name, (sizes, blocks_ahead) in SCHEDULES.items()
    }
    trial, workers = start_trial(WindowTrials(config, windows), schedules, "flow", wave_options.workers, options)
    # Twice, because a flow has the state of the previous window while it fills the state for the next window.
    sessions, reason = sessions_of(2 * solver.evaluations * math.prod(windows.dit.kept_shape()) * FLOAT_BYTES, options)
    info = ModelInfo(
        name=name_of(folder) + "-code2wav",
        revision=revision(
            folder,
            CODE_REVISION,
            dtype="float32",
            device=hardware(options.device),
            threads=options.threads,
            results=trial.results,
            settings=f"{wave_options.solver} {solver.steps} {wave_options.lookahead}",
        ),
        accepts=(CODES_PORT,),
        produces=(PortSpec(AUDIO, Content.AUDIO, rate_hz=config.sample_rate_hz, width=1),),
        max_sessions=sessions,
        voices=tuple(speakers),
        draws=True,
        settings={
            "solver": f"{wave_options.solver}, {solver.steps} steps, {solver.evaluations} evaluations",
            "lookahead": f"{wave_options.lookahead} blocks" if wave_options.lookahead else "by the profile",
            "max_sessions": reason,
            **trial.reasons,
        },
    )
    return FlowCode2Wav(config, windows, workers, schedules, speakers, info, trial)


def read_parts(folder: Path, config: WaveConfig, solver: Solver, device: torch.device) -> tuple[Windows, dict[str, Speaker]]:
    """(the nets, name of a voice -> its speaker). Raises BadCheckpoint."""
    with Weights(folder, _OTHERS) as weights, torch.inference_mode():

        def weight(prefix: str, name: str, shape: tuple[int, ...]) -> torch.Tensor:
            return _take_shaped(weights, prefix + name, shape).to(device)

        dit = Dit(config.dit, partial(weight, _PREFIX), solver.evaluation_times())
        vocoder = Vocoder(config.vocoder, partial(weight, _VOCODER))
        stored = {name: each for name, each in weights.header.items() if name.startswith(_EXAMPLE)}
        with torch.device("meta"), bound_building(stored, folder):  # Without memory, because its sizes are checked only when it is filled.
            examples = example_net(config.dit)
        fill(examples, weights, _EXAMPLE)
        weights.check_read()
        voices = read_voices(folder, VoiceSizes(config.dit.voice_size, config.dit.mel_bins))
        # Computed once for each voice, on the CPU; afterwards the net of the examples is not needed any more.
        speakers = {name: speaker_of(examples, voice.speaker, voice.example).to(device) for name, voice in voices.items()}
    return Windows(dit, vocoder, solver), speakers


def fill(net: torch.nn.Module, weights: Weights, prefix: str) -> None:
    """Put the weights whose names begin with `prefix` into a net. Raises BadCheckpoint."""
    state = {name: _take_shaped(weights, prefix + name, tuple(value.shape)) for name, value in net.state_dict().items()}
    net.load_state_dict(state, assign=True)
    net.eval().requires_grad_(False)


def _take_shaped(weights: Weights, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The weight of a name in float32. Raises BadCheckpoint if it is missing or misshapen."""
    weight = weights.need(name)
    if weight.shape != shape:
        raise BadCheckpoint(f"{weights.directory}: {name} is {tuple(weight.shape)}, not {shape}")
    return weight.float()
