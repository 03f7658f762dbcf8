"""Code2Wav of Qwen2.5-Omni: sound from codes while they are still being made, of many speeches at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import numpy as np

from omnistage.models.common.due import DueQueue
from omnistage.models.common.worker import Worker
from omnistage.models.interface import Activity, Array, Load, ModelInfo, Piece, Sound, Wanted, WaveRequest
from omnistage.models.options import LoadOptions
from omnistage.models.qwen2_5_omni.ports import CODES
from omnistage.models.qwen2_5_omni.voices import chosen_voice
from omnistage.models.qwen2_5_omni.wave.config import WaveConfig
from omnistage.models.qwen2_5_omni.wave.forecast import Arrivals, Pace, prebuffer_s
from omnistage.models.qwen2_5_omni.wave.schedule import Schedule
from omnistage.models.qwen2_5_omni.wave.speaker import Speaker
from omnistage.models.qwen2_5_omni.wave.speech import Prepared, Speech
from omnistage.models.qwen2_5_omni.wave.trial import Trial, form
from omnistage.models.qwen2_5_omni.wave.window import Job, Windows

AUDIO = "audio"


class FlowCode2Wav:
    """Implements `Code2WavModel`. Build it with `loading.load_code2wav`."""

    def __init__(
        self,
        config: WaveConfig,
        windows: Windows,
        queue: DueQueue[Job],
        worker: Worker,
        schedules: Mapping[str, Schedule],
        speakers: Mapping[str, Speaker],
        info: ModelInfo,
        trial: Trial,
    ) -> None:
        self.config, self.windows, self._queue, self._worker = config, windows, queue, worker
        self._schedules, self._speakers, self._info, self._trial, self._pace = schedules, speakers, info, trial, Pace()

    @classmethod
    def loaded(cls, folder: Path | None, options: LoadOptions) -> FlowCode2Wav:
        from omnistage.models.qwen2_5_omni.wave.loading import load_code2wav

        assert folder is not None
        return load_code2wav(folder, options)

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def threads(self) -> Sequence[Activity]:
        return (self._worker.activity,)

    def load(self) -> Load:
        return Load(queued=self._queue.waiting)

    async def prepare(self, request: WaveRequest) -> Prepared:
        """See Code2WavModel.prepare."""
        voice = chosen_voice(self._speakers, request.voice, "code2wav.voice")
        return Prepared(request.seed, self._schedules[request.profile], self._speakers[voice])

    def first_frame(self, prepared: Prepared, sample: int) -> int:
        """See Code2WavModel.first_frame: where the last refresh before the sample begins."""
        schedule = prepared.schedule
        return schedule.first_code(schedule.refreshed(sample // self.config.code_samples))

    async def decode(self, prepared: Prepared, inputs: AsyncIterator[Piece], wanted: Wanted) -> AsyncGenerator[Sound, None]:
        """See Code2WavModel.decode. No codes at all give no sound."""
        speech = Speech(self.config, self.windows, prepared, wanted[AUDIO])
        clock, arrivals = asyncio.get_running_loop().time, Arrivals()
        heard: float | None = None
        async for piece in inputs:
            assert isinstance(piece.content, np.ndarray)
            arrivals.came(clock(), len(piece.content))
            speech.feed(piece.first, piece.content, last=piece.last)
            while (job := speech.next()) is not None:
                begun, beside = clock(), self._queue.waiting + 1
                await self._queue.run(job, begun if heard is None else heard)
                if (expected_s := self._trial.seconds.get(form(speech.window))) is not None:
                    self._pace.took(clock() - begun, expected_s, beside)
                sound, last = speech.finish(job), job.leaves is None
                del job
                if len(sound.samples):
                    if heard is None:
                        told = 0.0 if last else self._prebuffer_s(prepared.schedule, arrivals, begun, clock())
                        sound = replace(sound, prebuffer_s=told)
                    heard = max(clock(), heard or 0.0) + len(sound.samples) / self.info.produces[0].rate_hz
                    yield sound

    def _prebuffer_s(self, schedule: Schedule, arrivals: Arrivals, begun: float, done: float) -> float:
        """Of a speech whose first window was begun and done then."""
        slowness, seconds = self._pace.slowness(self._queue.waiting + 1), self._trial.seconds
        code_s = self.config.code_samples / self.config.sample_rate_hz
        return prebuffer_s(schedule, code_s, arrivals.interval_s, lambda window: slowness * seconds[form(window)], begun, done)

    async def warm_up(self) -> None:
        """Speak for a second, with a window of each size of the usual schedule."""
        prepared = await self.prepare(WaveRequest(seed=0, profile="balanced"))
        codes = np.zeros((len(prepared.schedule.sizes) * 4 * self.config.block_codes, 1), np.uint32)
        async with aclosing(self.decode(prepared, _one(codes), {AUDIO: 0})) as sounds:
            async for _ in sounds:
                pass

    async def close(self) -> None:
        """End the thread. No session is running."""
        await self._worker.close()


async def _one(codes: Array) -> AsyncIterator[Piece]:
    yield Piece(CODES, 0, True, codes)
