"""Code2Wav of Qwen2.5-Omni: makes sound from codes while further codes are still being made, for many speeches at once."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace

import numpy as np

from omnistage.models.interface import Array, ModelInfo, Piece, Sound, Wanted, WaveRequest
from omnistage.models.qwen2_5_omni.wave.config import WaveConfig
from omnistage.models.qwen2_5_omni.wave.speaker import Speaker
from omnistage.models.qwen2_5_omni.wave.speech import PreparedSpeech, Speech, sound
from omnistage.models.qwen2_5_omni.wave.trial import form
from omnistage.models.qwen2_5_omni.wave.window import Job, Vocoding, Windows
from omnistage.models.requests import choose_voice
from omnistage.models.speech.code2wav import AUDIO, Trial, WindowedCode2Wav
from omnistage.models.speech.pace import Arrivals, Forecast, Halving
from omnistage.models.speech.schedule import Schedule
from omnistage.models.steps.loop import Loop
from omnistage.models.steps.orders import Listeners
from omnistage.models.worker import Worker, make_ahead


class FlowCode2Wav(WindowedCode2Wav[PreparedSpeech]):
    """The Code2Wav of Qwen2.5-Omni; implements `Code2WavModel` with a flow and a vocoder. Build it with `loading.load_code2wav`."""

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
        super().__init__(info, Loop(windows, Listeners[Job](trial.most, self._halving.worth), workers), workers)
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
            arrivals.came(clock(), len(piece.content))
            speech.feed(piece.first, piece.content, last=piece.last)
            while (flow := speech.next()) is not None:
                # A client that wants the whole speech at once does not listen before its end, so its sound is due after all other sound.
                due = due or (clock() if prepared.schedule.sizes else math.inf)
                assert speech.window is not None
                # The sound of the window before this one is made at the same time, so the slower of the two sets the pace of windows.
                with self._forecast.watching(speech.window, learning=flow.left is not None):
                    await self._loop.run(flow, due)
                vocoding = speech.solved(flow)
                if not has_sound:
                    # The listener waits for the first sound, so nothing else of the speech is computed before it.
                    await self._loop.run(vocoding, due)
                    has_sound = True
                del flow
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
        """See WindowedCode2Wav.usual_codes."""
        return np.zeros((len(prepared.schedule.sizes) * 4 * self.config.block_codes, 1), np.uint32)
