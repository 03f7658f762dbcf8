"""From TalkerParams and text or hidden rows to speech frames."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import numpy as np
from numpy.typing import NDArray

from omnistage.engine.types import Sampling
from omnistage.models.interface import BadRequest, Content, Frames, SpeechRequest, TalkerModel, TextPiece
from omnistage.stage.describe import describe
from omnistage.stage.logic import Input, LogicLoad, Output, Work
from omnistage.stage.params import bad_request, check_kind, check_sampling, refusals
from omnistage.v1 import chunk_pb2, stage_pb2

MAX_FRAMES = 1 << 20


class TalkerStage:
    """A TalkerModel as a stage."""

    def __init__(self, model: TalkerModel) -> None:
        self._model = model
        self.description = describe(stage_pb2.STAGE_KIND_TALKER, model.info)
        (self._output,) = model.info.produces

    def load(self) -> LogicLoad:
        return LogicLoad(queued=self._model.load().queued)

    def prepare(self, request: stage_pb2.Open) -> Work:
        check_kind(request.params, "talker")
        speech = parse(request.params.talker, request.seed)
        with refusals(BadRequest):
            self._model.check(speech)
        return lambda inputs, timing: self._run(speech, inputs)

    async def warm_up(self) -> None:
        await self._model.warm_up()

    async def close(self) -> None:
        await self._model.close()

    async def _run(self, request: SpeechRequest, inputs: AsyncIterator[Input]) -> AsyncGenerator[Output, None]:
        with refusals(BadRequest):
            async with aclosing(self._model.speak(request, _contents(inputs))) as pieces:
                async for frames in pieces:
                    yield Output(self._output.name, len(frames.rows), self._payload(frames), frames.finish_reason is not None)

    def _payload(self, frames: Frames) -> chunk_pb2.CodeChunk | NDArray[np.generic] | None:
        if len(frames.rows) == 0:
            return None
        if self._output.content is Content.CODES:
            return chunk_pb2.CodeChunk(codes=map(int, frames.rows.ravel()), codebook_count=frames.rows.shape[1])
        return frames.rows


def parse(params: stage_pb2.TalkerParams, seed: int) -> SpeechRequest:
    """Checked parameters. Raises BAD_REQUEST with the field that is bad."""
    check_sampling(params.sampling, "talker.sampling")
    speed = params.speed if params.HasField("speed") else 1.0
    if not math.isfinite(speed) or not 0.5 <= speed <= 2:
        raise bad_request("talker.speed", "must be from 0.5 to 2")
    if params.max_frames > MAX_FRAMES:
        raise bad_request("talker.max_frames", f"must be at most {MAX_FRAMES}")
    drawn = params.sampling
    sampling = Sampling(temperature=drawn.temperature, top_k=drawn.top_k, top_p=drawn.top_p if drawn.HasField("top_p") else 1.0)
    return SpeechRequest(seed=seed, voice=params.voice, sampling=sampling, max_frames=params.max_frames, speed=speed)


async def _contents(inputs: AsyncIterator[Input]) -> AsyncIterator[TextPiece | NDArray[np.float32]]:
    async for piece in inputs:
        match piece.payload:
            case chunk_pb2.TextChunk() as text:
                yield TextPiece(text.text, tuple(text.token_ids))
            case np.ndarray() as rows:
                yield rows
