"""From Code2WavParams and speech frames to sound."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from functools import partial

import numpy as np
from numpy.typing import NDArray

from omnistage.host.watchdog import Watched
from omnistage.models.interface import BadRequest, Code2WavModel, Content, SpeechFrames, WaveRequest
from omnistage.stage.describe import describe
from omnistage.stage.logic import Input, Kept, LogicLoad, Output, Start, Timing, Work
from omnistage.stage.params import bad_request, check_kind, protocol_error, refusals
from omnistage.v1 import chunk_pb2, stage_pb2

PROFILES = frozenset({"latency", "balanced", "quality", "offline"})
MAX_CHUNK_BYTES = 256 << 10
KEPT_FRAMES = 16
"""Frames that must have become needless before the caller is told: one message for many chunks."""


class Code2WavStage:
    """A Code2WavModel as a stage."""

    def __init__(self, model: Code2WavModel) -> None:
        self._model = model
        self.description = describe(stage_pb2.STAGE_KIND_CODE2WAV, model.info)
        (self._input,) = model.info.accepts
        (self._output,) = model.info.produces

    @property
    def threads(self) -> Sequence[Watched]:
        return self._model.threads

    def load(self) -> LogicLoad:
        return LogicLoad(queued=self._model.load().queued)

    async def prepare(self, request: stage_pb2.Open, start: Start) -> Work:
        check_kind(request.params, "code2wav")
        params = request.params.code2wav
        if params.profile and params.profile not in PROFILES:
            raise bad_request("code2wav.profile", f"must be one of {sorted(PROFILES)}")
        first = start.first.get(self._output.name, 0)
        wave = WaveRequest(request.seed, params.profile or "balanced", params.sample_rate_hz, params.voice, first)
        with refusals(BadRequest):
            self._model.check(wave)
        encoding = params.encoding or chunk_pb2.AUDIO_ENCODING_PCM16
        if encoding not in chunk_pb2.AudioEncoding.values():
            raise bad_request("code2wav.encoding", f"must be one of {chunk_pb2.AudioEncoding.keys()[1:]}")
        return Work(partial(self._run, wave, encoding), {self._input.name: self._model.first_frame(wave)})

    async def warm_up(self) -> None:
        await self._model.warm_up()

    async def close(self) -> None:
        await self._model.close()

    async def _run(
        self, request: WaveRequest, encoding: chunk_pb2.AudioEncoding, inputs: AsyncIterator[Input], timing: Timing, start: Start
    ) -> AsyncGenerator[Output | Kept, None]:
        if self._output.name in start.ended:
            return
        channels = self._output.width
        item_bytes = channels * (2 if encoding == chunk_pb2.AUDIO_ENCODING_PCM16 else 4)
        most = MAX_CHUNK_BYTES // item_bytes
        rate = request.sample_rate_hz or round(self._output.rate_hz)
        kept = self._model.first_frame(request)
        with refusals(BadRequest):
            async with aclosing(self._model.decode(request, self._frames(inputs))) as pieces:
                async for sound in pieces:
                    for begin in range(0, len(sound.samples), most):
                        part = sound.samples[begin : begin + most]
                        audio = chunk_pb2.AudioChunk(
                            data=encode(part, encoding), encoding=encoding, sample_rate_hz=rate, channel_count=channels
                        )
                        yield Output(self._output.name, len(part), audio)
                    if sound.needs >= kept + KEPT_FRAMES:
                        kept = sound.needs
                        yield Kept(self._input.name, kept)
        yield Output(self._output.name, 0, None, last=True)

    async def _frames(self, inputs: AsyncIterator[Input]) -> AsyncIterator[SpeechFrames]:
        """Also an empty piece, which says where the frames end."""
        async for piece in inputs:
            match piece.payload:
                case chunk_pb2.CodeChunk() as codes:
                    rows = np.array(codes.codes, np.uint32)
                    if codes.codebook_count != self._input.width or rows.size != piece.count * self._input.width:
                        raise protocol_error(f"port {piece.port!r}: {piece.count} frames of {self._input.width} codes were expected")
                    yield SpeechFrames(piece.first, rows.reshape(piece.count, self._input.width))
                case np.ndarray() as array:
                    yield SpeechFrames(piece.first, array)
                case None:
                    none = np.empty((0, self._input.width), np.float32)
                    yield SpeechFrames(piece.first, none.astype(np.uint32) if self._input.content is Content.CODES else none)


def encode(samples: NDArray[np.float32], encoding: chunk_pb2.AudioEncoding) -> bytes:
    """[n, channels] in -1..1 as interleaved little-endian bytes."""
    if encoding == chunk_pb2.AUDIO_ENCODING_FLOAT32:
        return samples.astype("<f4").tobytes()
    return np.clip(np.rint(samples * 32768), -32768, 32767).astype("<i2").tobytes()
