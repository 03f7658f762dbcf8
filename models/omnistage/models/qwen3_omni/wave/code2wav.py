"""Code2Wav of Qwen3-Omni: makes sound from frames of codes while further frames are still being made, for many speeches at once."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace

import numpy as np

from omnistage.models.interface import Array, ModelInfo, Piece, Profile, Sound, Wanted, WaveRequest
from omnistage.models.qwen3_omni.wave.config import SAMPLE_RATE_HZ, WaveConfig
from omnistage.models.qwen3_omni.wave.speech import PreparedSpeech, Speech, first_frame
from omnistage.models.qwen3_omni.wave.trial import form
from omnistage.models.qwen3_omni.wave.window import WindowJob, Windows
from omnistage.models.speech.code2wav import AUDIO, Trial, WindowedCode2Wav
from omnistage.models.speech.pace import Arrivals, Forecast
from omnistage.models.speech.schedule import Schedule
from omnistage.models.steps.loop import Loop
from omnistage.models.steps.orders import Listeners
from omnistage.models.worker import Worker, make_ahead


class CausalCode2Wav(WindowedCode2Wav[PreparedSpeech]):
    """The Code2Wav of Qwen3-Omni; implements `Code2WavModel` with a net that looks back only. Build it with `loading.load_code2wav`."""

    def __init__(
        self,
        config: WaveConfig,
        windows: Windows,
        workers: Sequence[Worker],
        schedules: Mapping[str, Schedule],
        info: ModelInfo,
        trial: Trial,
    ) -> None:
        super().__init__(info, Loop(windows, Listeners[WindowJob](trial.most, lambda key: False), workers), workers)
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
            arrivals.came(clock(), len(piece.content))
            speech.feed(piece.first, piece.content, last=piece.last)
            while (job := speech.next()) is not None:
                assert speech.window is not None
                due = due or (clock() if prepared.heard else math.inf)
                begin_s = clock()
                with self._forecast.watching(speech.window, learning=speech.window.begin > 0 and not job.silent):
                    await self._loop.run(job, due)
                sound, last = speech.made(job), speech.window.last
                del job
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
