"""A Talker as a stage: checks TalkerParams, and turns the model's speech frames and times of words into chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from omnistage.models.interface import Alignment, Content, FinishReason, Frames, P, SpeechRequest, TalkerModel, Unspoken
from omnistage.stage.content import codes_of, pieces, row_outputs
from omnistage.stage.logic import Input, Output, SessionTiming, Start, Work
from omnistage.stage.model import ModelStage, refusals
from omnistage.stage.params import check_params, sampling_of, values_for
from omnistage.v1 import chunk_pb2, stage_pb2


class TalkerStage(ModelStage[TalkerModel[P]]):
    """A TalkerModel as a stage. It has one port of speech frames, and may have one for the times of spoken words."""

    kind = stage_pb2.STAGE_KIND_TALKER

    def __init__(self, model: TalkerModel[P]) -> None:
        super().__init__(model)
        timings = [port.name for port in model.info.produces if port.content is Content.ALIGNMENT]
        self._alignment = timings[0] if timings else ""  # Name of the port; empty: the model gives no times.
        (self._output,) = (port for port in model.info.produces if port.name != self._alignment)

    async def prepare(self, request: stage_pb2.Open, start: Start) -> Work:
        check_params(request.params, "talker")
        speech = replace(parse(request.params.talker, request.seed), client=request.client, scope=request.scope)
        if self._output.compact:
            history = codes_of(start, self._output)  # Checked even if the port has ended.
            if self._output.name not in start.ended_ports:
                speech = replace(speech, history=history)
        with refusals():
            prepared = await self._model.prepare(speech)
        return Work(partial(self._run, prepared, max_frames=speech.max_frames, drew=self._drew(speech.sampling.temperature)))

    async def _run(
        self, prepared: P, inputs: AsyncIterator[Input], timing: SessionTiming, start: Start, *, max_frames: int, drew: bool
    ) -> AsyncGenerator[Output, None]:
        """Speak, and yield the frames and the times of words that are still to come; see Work.run. max_frames: of the request. drew: see
        SessionTiming."""
        timing.drew = drew
        ports = start.find_open_ports(self._model.info.produces)
        frames = ports.get(self._output.name, 0)
        if not ports and not self._model.info.tells_unspoken:
            return
        with refusals():
            async with aclosing(self._model.speak(prepared, pieces(inputs, self._model.info.accepts), ports)) as produced:
                async for piece in produced:
                    match piece:
                        case Unspoken(runs):
                            timing.not_spoken(runs)
                        case Alignment():
                            yield self._words(piece)
                        case Frames():
                            frames += len(piece.rows)
                            if piece.finish_reason is FinishReason.LENGTH:
                                timing.note(_cut_note(frames, max_frames))
                            for output in self._outputs(piece):
                                yield output

    def _words(self, piece: Alignment) -> Output:
        """The output for times of words."""
        words = [
            chunk_pb2.SpokenWord(
                first_character=word.first_character,
                character_count=word.character_count,
                begin_us=word.begin_us,
                end_us=word.end_us,
            )
            for word in piece.words
        ]
        return Output(self._alignment, len(words), chunk_pb2.AlignmentChunk(words=words) if words else None, piece.last)

    def _outputs(self, frames: Frames) -> list[Output]:
        """The outputs for frames that the model made, which are rows or codes."""
        last = frames.finish_reason is not None
        if self._output.content is Content.TENSOR:
            return list(row_outputs(self._output, frames.rows, last=last))
        if not len(frames.rows):
            return [Output(self._output.name, 0, None, last)]
        codes = chunk_pb2.CodeChunk(codes=map(int, frames.rows.ravel()), codebook_count=frames.rows.shape[1])
        return [Output(self._output.name, len(frames.rows), codes, last)]


def _cut_note(frames: int, max_frames: int) -> str:
    """A note on speech that was cut after so many frames."""
    cause = "a higher max_frames lets it say more" if frames == max_frames else "the model has no room for more"
    return f"the speech was cut at {frames} frames; {cause}"


def parse(params: stage_pb2.TalkerParams, seed: int) -> SpeechRequest:
    """The parameters, checked, as models take them. Raises BAD_REQUEST with the bad field."""
    return SpeechRequest(seed=seed, sampling=sampling_of(params.sampling, "talker"), **values_for(SpeechRequest, params))
