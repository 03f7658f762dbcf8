"""From ThinkerParams to a model's pieces of text, and from those to chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from omnistage.engine.types import FinishReason, Sampling
from omnistage.host.watchdog import Watched
from omnistage.models.interface import BadRequest, TextPiece, TextRequest, ThinkerModel, Turn
from omnistage.stage.describe import describe
from omnistage.stage.logic import Input, LogicLoad, Output, Start, Timing, Work
from omnistage.stage.params import HISTORY, bad_request, check_kind, check_sampling, earlier_output, protocol_error, refusals
from omnistage.v1 import chunk_pb2, stage_pb2

MAX_TOKENS = 32768
MAX_STOP_CHARACTERS = 256
ROLES = frozenset({"system", "user", "assistant"})

FINISH = {
    FinishReason.STOP: chunk_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: chunk_pb2.FINISH_REASON_LENGTH,
    FinishReason.INTERRUPTED: chunk_pb2.FINISH_REASON_INTERRUPTED,
}
FINISHED = {number: reason for reason, number in FINISH.items()}


class ThinkerStage:
    """A ThinkerModel as a stage."""

    def __init__(self, model: ThinkerModel) -> None:
        self._model = model
        self.description = describe(stage_pb2.STAGE_KIND_THINKER, model.info)
        self._has_hidden = any(port.name == "hidden" for port in model.info.produces)

    @property
    def threads(self) -> Sequence[Watched]:
        return self._model.threads

    def load(self) -> LogicLoad:
        load = self._model.load()
        return LogicLoad(load.queued, load.kv_pages_used, load.kv_pages_total)

    async def prepare(self, request: stage_pb2.Open, start: Start) -> Work:
        check_kind(request.params, "thinker")
        text_request = resumed(parse(request.params.thinker, request.seed), start)
        with refusals(BadRequest):
            prepared = await self._model.prepare(text_request)
        return Work(partial(self._run, prepared))

    async def warm_up(self) -> None:
        await self._model.warm_up()

    async def close(self) -> None:
        await self._model.close()

    async def _run(self, request: TextRequest, inputs: AsyncIterator[Input], timing: Timing, start: Start) -> AsyncGenerator[Output, None]:
        wants_text = "text" not in start.ended
        wants_rows = self._has_hidden and "hidden" not in start.ended
        if not (wants_text or wants_rows):
            return
        known = len(request.history)
        token = start.first.get("hidden", 0) if wants_rows else known
        if token > known:
            raise protocol_error(f"port 'hidden' cannot go on at row {token}: there are only {known} tokens so far", port="hidden")
        with refusals(BadRequest):
            async with aclosing(self._model.generate(replace(request, rows_from=token))) as pieces:
                async for piece in pieces:
                    timing.queued_s += piece.queued_s
                    last = piece.finish_reason is not None
                    count = len(piece.token_ids)
                    # Text first: the caller must have the tokens before anybody has what was made from them.
                    if wants_text and token >= known:
                        yield Output("text", count, _text(piece), last)
                    if wants_rows:
                        yield Output("hidden", count, piece.hidden if count else None, last)
                    token += count


def parse(params: stage_pb2.ThinkerParams, seed: int) -> TextRequest:
    """Checked parameters. Raises BAD_REQUEST with the field that is bad."""
    check_sampling(params.sampling, "thinker.sampling")
    if not 1 <= params.max_tokens <= MAX_TOKENS:
        raise bad_request("thinker.max_tokens", f"must be from 1 to {MAX_TOKENS}")
    if params.min_tokens > params.max_tokens:
        raise bad_request("thinker.min_tokens", "must not be above max_tokens")
    if any(not 1 <= len(stop) <= MAX_STOP_CHARACTERS for stop in params.stop):
        raise bad_request("thinker.stop", f"strings of 1 to {MAX_STOP_CHARACTERS} characters")
    if params.HasField("constraint"):
        raise bad_request("thinker.constraint", "this model cannot constrain its text; leave it out")
    return TextRequest(
        turns=_turns(params),
        seed=seed,
        sampling=sampling(params.sampling),
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop=tuple(params.stop),
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs,
        verbatim=params.verbatim,
    )


def resumed(request: TextRequest, start: Start) -> TextRequest:
    """The request, with what the caller already has of its answer. Raises BAD_REQUEST for a history that does not fit its position."""
    history = earlier_output(start, "text")
    if len(history.text.token_ids) != history.count:
        raise bad_request(HISTORY, f"{history.count} tokens of port 'text' were expected, it has {len(history.text.token_ids)}")
    finished = FINISHED.get(history.text.finish_reason)
    if (finished is not None) != ("text" in start.ended):
        raise bad_request(HISTORY, "port 'text' has a finish reason if it has ended, and only then")
    return replace(request, history=tuple(history.text.token_ids), finished=finished)


def sampling(params: stage_pb2.Sampling) -> Sampling:
    """Checked sampling parameters in the engine's form."""
    return Sampling(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p if params.HasField("top_p") else 1.0,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty if params.HasField("repetition_penalty") else 1.0,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias),
    )


def _turns(params: stage_pb2.ThinkerParams) -> tuple[Turn, ...]:
    if not params.messages and not params.verbatim:
        raise bad_request("thinker.messages", "at least one message is needed")
    turns = []
    for message in params.messages:
        if message.role not in ROLES:
            raise bad_request("thinker.messages.role", f"must be one of {sorted(ROLES)}")
        if not all(part.WhichOneof("content") == "text" for part in message.parts):
            raise bad_request("thinker.messages.parts", "this model takes text only")
        turns.append(Turn(message.role, "".join(part.text for part in message.parts)))
    if turns and not params.verbatim and not any(turn.text.strip() for turn in turns if turn.role == "user"):
        raise bad_request("thinker.messages", "a user message with text is needed")
    return tuple(turns)


def _text(piece: TextPiece) -> chunk_pb2.TextChunk:
    finish = FINISH[piece.finish_reason] if piece.finish_reason else chunk_pb2.FINISH_REASON_UNSPECIFIED
    return chunk_pb2.TextChunk(text=piece.text, token_ids=piece.token_ids, logprobs=piece.logprobs, finish_reason=finish)
