"""From Code2WavParams and speech frames to sound. An imagined player of the sound counts how often and how long it has nothing to play."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial

from omnistage.code2wav.resampling import Conversion, convert_sounds, warm_up
from omnistage.models.interface import Code2WavModel, P, Piece, Sound, WaveRequest
from omnistage.stage.content import pieces, sound_outputs
from omnistage.stage.logic import Input, Kept, Output, SessionTiming, Start, Work
from omnistage.stage.model import ModelStage, refusals
from omnistage.stage.params import check_params, values_for
from omnistage.v1 import chunk_pb2, stage_pb2

GRACE_S = 0.02
"""Sound that is late by fewer seconds does not count as late, because its way to the listener takes as long."""


class Playhead:
    """Plays in real time, beginning `prebuffer_s` after the first sound came. Times are seconds of one clock. underruns: how often there
    was nothing left to play. starved_s: how many seconds that lasted in all."""

    def __init__(self) -> None:
        self._dry_at: float | None = None  # when all sound so far is played; None: none has come
        self.underruns = 0
        self.starved_s = 0.0

    def hear(self, now_s: float, seconds: float, prebuffer_s: float = 0.0) -> None:
        """Note that `seconds` of sound came at the time `now_s`. prebuffer_s: counts only with the first sound."""
        if self._dry_at is None:
            self._dry_at = now_s + prebuffer_s
        elif (late_s := now_s - self._dry_at) > GRACE_S:
            self.underruns += 1
            self.starved_s += late_s
            self._dry_at = now_s
        self._dry_at += seconds

    def pause(self, seconds: float) -> None:
        """Note that the client itself accepted no sound for `seconds`, so that this time does not count as starved."""
        if self._dry_at is not None:
            self._dry_at += seconds


KEPT_FRAMES = 16
"""The caller may forget frames only in groups of at least this size, so that one message serves many chunks."""


class Code2WavStage(ModelStage[Code2WavModel[P]]):
    """A Code2WavModel as a stage."""

    kind = stage_pb2.STAGE_KIND_CODE2WAV

    def __init__(self, model: Code2WavModel[P], clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(model)
        self._clock = clock
        (self._input,) = model.info.accepts
        (self._output,) = model.info.produces
        self._rate_hz = round(self._output.rate_hz)

    async def prepare(self, request: stage_pb2.Open, start: Start) -> Work:
        check_params(request.params, "code2wav")
        params = request.params.code2wav
        encoding = params.encoding or chunk_pb2.AUDIO_ENCODING_PCM16
        wave = WaveRequest(request.seed, client=request.client, **values_for(WaveRequest, params))
        with refusals():
            conversion = Conversion.for_rates(self._rate_hz, params.sample_rate_hz)
            prepared = await self._model.prepare(wave)
        first_needed = self._first_frame(prepared, conversion, start.first.get(self._output.name, 0))
        return Work(partial(self._run, prepared, encoding, conversion), {self._input.name: first_needed})

    def _first_frame(self, prepared: P, conversion: Conversion | None, sample: int) -> int:
        """Number of the first frame that is needed to make the sound from sample number `sample` on, at the requested rate."""
        return self._model.first_frame(prepared, sample if conversion is None else conversion.first_needed(sample))

    async def _run(
        self,
        prepared: P,
        encoding: chunk_pb2.AudioEncoding,
        conversion: Conversion | None,
        inputs: AsyncIterator[Input],
        timing: SessionTiming,
        start: Start,
    ) -> AsyncGenerator[Output | Kept, None]:
        """Yield the sound that is still to come, and a Kept whenever the caller may forget more frames."""
        timing.drew = self._model.info.draws
        ports = start.find_open_ports([self._output])
        if not ports:
            return
        first = ports[self._output.name]
        first_kept = self._first_frame(prepared, conversion, first)
        rate_hz = self._rate_hz if conversion is None else conversion.rate_hz
        player = Playhead()
        with refusals():
            async with self._sounds(prepared, conversion, pieces(inputs, [self._input]), first) as sounds:
                async for sound in sounds:
                    if len(sound.samples):
                        player.hear(self._clock(), len(sound.samples) / rate_hz, sound.prebuffer_s or 0.0)
                        timing.audio_underruns, timing.audio_starved_s = player.underruns, player.starved_s
                    # A session that goes on elsewhere does not say the prebuffer again.
                    prebuffer_ms = None if first or sound.prebuffer_s is None else math.ceil(1000 * sound.prebuffer_s)
                    for output in sound_outputs(self._output, sound.samples, rate_hz, encoding, prebuffer_ms):
                        yielded_at = self._clock()
                        yield output
                        player.pause(self._clock() - yielded_at)
                    if sound.needs >= first_kept + KEPT_FRAMES:
                        first_kept = sound.needs
                        yield Kept(self._input.name, first_kept)
        yield Output(self._output.name, 0, None, last=True)

    @asynccontextmanager
    async def _sounds(
        self, prepared: P, conversion: Conversion | None, frames: AsyncIterator[Piece], first: int
    ) -> AsyncIterator[AsyncGenerator[Sound, None]]:
        """Hold the generator of the sound from sample number `first` on, at the requested rate, and close it at the end of the block."""
        name = self._output.name
        if conversion is None:
            async with aclosing(self._model.decode(prepared, frames, {name: first})) as sounds:
                yield sounds
            return
        first_needed = self._first_frame(prepared, conversion, first)
        async with (
            aclosing(self._model.decode(prepared, frames, {name: conversion.first_needed(first)})) as sounds,
            aclosing(convert_sounds(sounds, conversion, self._output.width, first, first_needed)) as resampled,
        ):
            yield resampled

    async def warm_up(self) -> None:
        await super().warm_up()
        await warm_up(self._rate_hz)
