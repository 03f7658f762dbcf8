"""From Code2WavParams and speech frames to sound."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import numpy as np
from numpy.typing import NDArray

from omnistage.models.interface import BadRequest, Code2WavModel, WaveRequest
from omnistage.stage.describe import describe
from omnistage.stage.logic import Input, LogicLoad, Output, Work
from omnistage.stage.params import bad_request, check_kind, protocol_error, refusals
from omnistage.v1 import chunk_pb2, stage_pb2

PROFILES = frozenset({"latency", "balanced", "quality", "offline"})
MAX_CHUNK_BYTES = 256 << 10


class Code2WavStage:
    """A Code2WavModel as a stage."""

    def __init__(self, model: Code2WavModel) -> None:
        self._model = model
        self.description = describe(stage_pb2.STAGE_KIND_CODE2WAV, model.info)
        (self._input,) = model.info.accepts
        (self._output,) = model.info.produces

    def load(self) -> LogicLoad:
        return LogicLoad(queued=self._model.load().queued)

    def prepare(self, request: stage_pb2.Open) -> Work:
        check_kind(request.params, "code2wav")
        params = request.params.code2wav
        if params.profile and params.profile not in PROFILES:
            raise bad_request("code2wav.profile", f"must be one of {sorted(PROFILES)}")
        wave = WaveRequest(request.seed, params.profile or "balanced", params.sample_rate_hz, params.voice)
        with refusals(BadRequest):
            self._model.check(wave)
        encoding = params.encoding or chunk_pb2.AUDIO_ENCODING_PCM16
        if encoding not in chunk_pb2.AudioEncoding.values():
            raise bad_request("code2wav.encoding", f"must be one of {chunk_pb2.AudioEncoding.keys()[1:]}")
        return lambda inputs, timing: self._run(wave, encoding, inputs)

    async def warm_up(self) -> None:
        await self._model.warm_up()

    async def close(self) -> None:
        await self._model.close()

    async def _run(
        self, request: WaveRequest, encoding: chunk_pb2.AudioEncoding, inputs: AsyncIterator[Input]
    ) -> AsyncGenerator[Output, None]:
        channels = self._output.width
        item_bytes = channels * (2 if encoding == chunk_pb2.AUDIO_ENCODING_PCM16 else 4)
        most = MAX_CHUNK_BYTES // item_bytes
        rate = request.sample_rate_hz or round(self._output.rate_hz)
        with refusals(BadRequest):
            async with aclosing(self._model.decode(request, self._frames(inputs))) as pieces:
                async for samples in pieces:
                    for begin in range(0, len(samples), most):
                        part = samples[begin : begin + most]
                        audio = chunk_pb2.AudioChunk(
                            data=encode(part, encoding), encoding=encoding, sample_rate_hz=rate, channel_count=channels
                        )
                        yield Output(self._output.name, len(part), audio)
        yield Output(self._output.name, 0, None, last=True)

    async def _frames(self, inputs: AsyncIterator[Input]) -> AsyncIterator[NDArray[np.uint32] | NDArray[np.float32]]:
        async for piece in inputs:
            match piece.payload:
                case chunk_pb2.CodeChunk() as codes:
                    rows = np.array(codes.codes, np.uint32)
                    if codes.codebook_count != self._input.width or rows.size != piece.count * self._input.width:
                        raise protocol_error(f"port {piece.port!r}: {piece.count} frames of {self._input.width} codes were expected")
                    yield rows.reshape(piece.count, self._input.width)
                case np.ndarray() as array:
                    yield array


def encode(samples: NDArray[np.float32], encoding: chunk_pb2.AudioEncoding) -> bytes:
    """[n, channels] in -1..1 as interleaved little-endian bytes."""
    if encoding == chunk_pb2.AUDIO_ENCODING_FLOAT32:
        return samples.astype("<f4").tobytes()
    return np.clip(np.rint(samples * 32768), -32768, 32767).astype("<i2").tobytes()
