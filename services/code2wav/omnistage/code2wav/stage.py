"""From Code2WavParams and speech frames to sound."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from functools import partial

from omnistage.models.interface import Code2WavModel, P, WaveRequest
from omnistage.stage.logic import Input, Kept, Output, Start, Timing, Work
from omnistage.stage.model import ModelStage
from omnistage.stage.params import bad_request, check_kind, refusals
from omnistage.stage.pieces import pieces, sound_outputs
from omnistage.v1 import chunk_pb2, stage_pb2

PROFILES = frozenset({"latency", "balanced", "quality", "offline"})
KEPT_FRAMES = 16
"""Frames that must have become needless before the caller is told: one message for many chunks."""


class Code2WavStage(ModelStage[Code2WavModel[P]]):
    """A Code2WavModel as a stage."""

    kind = stage_pb2.STAGE_KIND_CODE2WAV

    def __init__(self, model: Code2WavModel[P]) -> None:
        super().__init__(model)
        (self._input,) = model.info.accepts
        (self._output,) = model.info.produces

    async def prepare(self, request: stage_pb2.Open, start: Start) -> Work:
        check_kind(request.params, "code2wav")
        params = request.params.code2wav
        if params.profile and params.profile not in PROFILES:
            raise bad_request("code2wav.profile", f"must be one of {sorted(PROFILES)}")
        encoding = params.encoding or chunk_pb2.AUDIO_ENCODING_PCM16
        if encoding not in chunk_pb2.AudioEncoding.values():
            raise bad_request("code2wav.encoding", f"must be one of {chunk_pb2.AudioEncoding.keys()[1:]}")
        wave = WaveRequest(request.seed, params.profile or "balanced", params.sample_rate_hz, params.voice, request.client)
        with refusals():
            prepared = await self._model.prepare(wave)
        needed = self._model.first_frame(prepared, start.first.get(self._output.name, 0))
        rate_hz = params.sample_rate_hz or round(self._output.rate_hz)
        return Work(partial(self._run, prepared, encoding, rate_hz), {self._input.name: needed})

    async def _run(
        self, prepared: P, encoding: chunk_pb2.AudioEncoding, rate_hz: int, inputs: AsyncIterator[Input], timing: Timing, start: Start
    ) -> AsyncGenerator[Output | Kept, None]:
        wanted = start.wanted([self._output])
        if not wanted:
            return
        kept = self._model.first_frame(prepared, wanted[self._output.name])
        with refusals():
            async with aclosing(self._model.decode(prepared, pieces(inputs, [self._input]), wanted)) as made:
                async for sound in made:
                    for output in sound_outputs(self._output, sound.samples, rate_hz, encoding):
                        yield output
                    if sound.needs >= kept + KEPT_FRAMES:
                        kept = sound.needs
                        yield Kept(self._input.name, kept)
        yield Output(self._output.name, 0, None, last=True)
