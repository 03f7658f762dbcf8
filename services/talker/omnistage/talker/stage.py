"""From TalkerParams and text or hidden rows to speech frames."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from omnistage.engine.types import Sampling
from omnistage.host.watchdog import Watched
from omnistage.models.interface import BadRequest, Content, Frames, SpeechRequest, TalkerModel, TextPiece
from omnistage.stage.describe import describe
from omnistage.stage.logic import Input, LogicLoad, Output, Start, Timing, Work
from omnistage.stage.params import HISTORY, bad_request, check_kind, check_sampling, earlier_output, refusals
from omnistage.v1 import chunk_pb2, stage_pb2

MAX_FRAMES = 1 << 20


class TalkerStage:
    """A TalkerModel as a stage."""

    def __init__(self, model: TalkerModel) -> None:
        self._model = model
        self.description = describe(stage_pb2.STAGE_KIND_TALKER, model.info)
        (self._output,) = model.info.produces

    @property
    def threads(self) -> Sequence[Watched]:
        return self._model.threads

    def load(self) -> LogicLoad:
        return LogicLoad(queued=self._model.load().queued)

    async def prepare(self, request: stage_pb2.Open, start: Start) -> Work:
        check_kind(request.params, "talker")
        speech = parse(request.params.talker, request.seed)
        history = self._codes(start) if self._output.content is Content.CODES else None
        if history is not None and self._output.name not in start.ended:
            speech = replace(speech, first=len(history), history=history)
        with refusals(BadRequest):
            self._model.check(speech)
        return Work(partial(self._run, speech))

    async def warm_up(self) -> None:
        await self._model.warm_up()

    async def close(self) -> None:
        await self._model.close()

    async def _run(
        self, request: SpeechRequest, inputs: AsyncIterator[Input], timing: Timing, start: Start
    ) -> AsyncGenerator[Output, None]:
        if self._output.name in start.ended:
            return
        request = replace(request, first=start.first.get(self._output.name, 0))
        with refusals(BadRequest):
            async with aclosing(self._model.speak(request, _contents(inputs))) as pieces:
                async for frames in pieces:
                    yield Output(self._output.name, len(frames.rows), self._payload(frames), frames.finish_reason is not None)

    def _codes(self, start: Start) -> NDArray[np.uint32]:
        """The frames that the caller already has, [frames, codebooks]. Raises BAD_REQUEST for others than this model makes."""
        history, width = earlier_output(start, self._output.name), self._output.width
        codes = np.array(history.codes.codes, np.uint32)
        if codes.size != history.count * width or (history.count and history.codes.codebook_count != width):
            raise bad_request(HISTORY, f"{history.count} frames of {width} codes were expected on port {self._output.name!r}")
        return codes.reshape(history.count, width)

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
