"""A Thinker as a stage: checks ThinkerParams, and turns the model's pieces of text and rows into chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import cast

from omnistage.models.conversation import Part, Streamed, TextConstraint, Turn
from omnistage.models.interface import Content, FinishReason, P, TensorRows, TextPiece, TextRequest, ThinkerModel
from omnistage.stage.content import pieces, row_outputs
from omnistage.stage.logic import Input, Output, SessionTiming, Start, Work
from omnistage.stage.model import ModelStage, refusals
from omnistage.stage.params import HISTORY, bad_request, check_params, media_of, sampling_of, streamed_of, values_for
from omnistage.v1 import chunk_pb2, stage_pb2

MAX_CONSTRAINT_CHARACTERS = 1 << 16
"""Largest number of characters of a schema, of a regular expression, or of all choices together."""

FINISH = {reason: cast(chunk_pb2.FinishReason, chunk_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}")) for reason in FinishReason}
FINISHED = {number: reason for reason, number in FINISH.items()}


class ThinkerStage(ModelStage[ThinkerModel[P]]):
    """A ThinkerModel as a stage. It has one text port, whose items are tokens; an answer can go on after any token."""

    kind = stage_pb2.STAGE_KIND_THINKER

    def __init__(self, model: ThinkerModel[P]) -> None:
        super().__init__(model)
        self._produces = {port.name: port for port in model.info.produces}
        # The text port is compact, because an answer that goes on needs all of its earlier tokens.
        texts = [port.name for port in model.info.produces if port.content is Content.TEXT and port.compact]
        if len(texts) != 1:
            raise ValueError(f"{model.info.name} is a Thinker and must have one compact port of text; it has {', '.join(texts) or 'none'}")
        self._text = texts[0]

    async def prepare(self, request: stage_pb2.Open, start: Start) -> Work:
        check_params(request.params, "thinker")
        parsed = parse(request.params.thinker, request.seed, self._model.info.usual_tokens)
        parsed = continue_request(replace(parsed, client=request.client, scope=request.scope), start, self._text)
        with refusals():
            prepared = await self._model.prepare(parsed)
        return Work(partial(self._run, prepared, drew=self._drew(0.0 if parsed.verbatim else parsed.sampling.temperature)))

    async def _run(
        self, prepared: P, inputs: AsyncIterator[Input], timing: SessionTiming, start: Start, *, drew: bool
    ) -> AsyncGenerator[Output, None]:
        """Generate, and yield the text and the rows that are still to come; see Work.run. drew: see SessionTiming."""
        timing.drew = drew
        ports = start.find_open_ports(self._model.info.produces)
        if not ports:
            return
        with refusals():
            async with aclosing(self._model.generate(prepared, pieces(inputs, self._model.info.accepts), ports)) as produced:
                async for piece in produced:
                    match piece:
                        case TextPiece():
                            timing.queued_s += piece.queued_s
                            timing.cached_tokens += piece.cached_tokens
                            if piece.prompt_tokens is not None:
                                timing.prompt_tokens = piece.prompt_tokens
                            yield Output(self._text, len(piece.token_ids), _text(piece), piece.finish_reason is not None)
                        case TensorRows():
                            for output in row_outputs(self._produces[piece.port], piece.rows, last=piece.last):
                                yield output


def parse(params: stage_pb2.ThinkerParams, seed: int, usual_tokens: int = 0) -> TextRequest:
    """The parameters, checked, as models take them. usual_tokens: see ModelInfo. Raises BAD_REQUEST with the bad field."""
    max_tokens = params.max_tokens or usual_tokens
    if not max_tokens:
        raise bad_request("thinker.max_tokens", "must be at least 1")
    if params.min_tokens > max_tokens:
        raise bad_request("thinker.min_tokens", "must not be above max_tokens")
    if not all(params.stop):
        raise bad_request("thinker.stop", "has an empty text")
    return TextRequest(
        turns=_turns(params),
        seed=seed,
        sampling=sampling_of(params.sampling, "thinker"),
        constraint=_constraint(params),
        is_usual_length=not params.max_tokens,
        **values_for(TextRequest, params) | {"max_tokens": max_tokens, "logprobs": params.logprobs or params.top_logprobs > 0},
    )


def continue_request(request: TextRequest, start: Start, port: str) -> TextRequest:
    """The request with the part of its answer that the caller already has. port: the text port. Raises BAD_REQUEST for a text that has
    ended without a reason, or has a reason without having ended."""
    text = start.history.get(port, chunk_pb2.Chunk()).text
    finished = FINISHED.get(text.finish_reason)
    has_ended = port in start.ended_ports and port in start.history  # An unwanted port is in `ended_ports` too, without a history.
    if (finished is not None) != has_ended:
        raise bad_request(HISTORY, f"port {port!r} has a finish reason if it has ended, and only then")
    return replace(request, history=tuple(text.token_ids), finished=finished)


def _turns(params: stage_pb2.ThinkerParams) -> tuple[Turn, ...]:
    """The messages as models take them. Raises BAD_REQUEST."""
    if not params.messages and not params.verbatim:
        raise bad_request("thinker.messages", "at least one message is needed")
    for message in params.messages:
        if not message.role:  # Another one is refused by the contract.
            raise bad_request("thinker.messages.role", "is empty: give system, user or assistant")
    turns = tuple(Turn(message.role, tuple(map(_part, message.parts))) for message in params.messages)
    ports = [part.port for turn in turns for part in turn.parts if isinstance(part, Streamed)]
    if len(set(ports)) < len(ports):
        raise bad_request("thinker.messages.parts.port", "a port carries one medium: name another one for each")
    if turns and not params.verbatim and not any(_says_something(turn) for turn in turns if turn.role == "user"):
        raise bad_request("thinker.messages", "a user message with text or media in it is needed")
    return turns


def _part(part: stage_pb2.Part) -> Part:
    """A part of a message as models take it. Raises BAD_REQUEST."""
    match part.WhichOneof("content"):
        case "text":
            return part.text
        case "media":
            return media_of(part.media, "thinker.messages.parts.media")
        case "port":
            return streamed_of(part, "thinker.messages.parts")
    raise bad_request("thinker.messages.parts", "a part is text, media or the name of a port")


def _says_something(turn: Turn) -> bool:
    """Whether a message has a medium, or text that is not blank."""
    return any(not isinstance(part, str) or part.strip() for part in turn.parts)


def _constraint(params: stage_pb2.ThinkerParams) -> TextConstraint | None:
    """The form that the text must have; None: any. Raises BAD_REQUEST."""
    form = params.constraint.WhichOneof("form")
    if form is None:
        return None
    if form == "choice":
        texts = tuple(params.constraint.choice.texts)
        constraint = TextConstraint(form, choices=texts)
    else:
        constraint = TextConstraint(form, getattr(params.constraint, form))
        texts = (constraint.text,)
    field = f"thinker.constraint.{form}"
    if params.verbatim:
        raise bad_request(field, "text that is given is said as it is: leave the constraint out, or thinker.verbatim")
    if not texts or not all(texts):
        raise bad_request(field, "is empty")
    if sum(map(len, texts)) > MAX_CONSTRAINT_CHARACTERS:
        raise bad_request(field, f"at most {MAX_CONSTRAINT_CHARACTERS} characters")
    return constraint


def _text(piece: TextPiece) -> chunk_pb2.TextChunk:
    """A piece of text as the payload of a chunk."""
    finish = FINISH[piece.finish_reason] if piece.finish_reason else chunk_pb2.FINISH_REASON_UNSPECIFIED
    return chunk_pb2.TextChunk(
        text=piece.text,
        token_ids=piece.token_ids,
        logprobs=piece.logprobs,
        pieces=piece.pieces,
        finish_reason=finish,
        thought=piece.thought,
        top_logprobs=[
            chunk_pb2.TopLogprobs(
                token_ids=[candidate.token_id for candidate in top],
                logprobs=[candidate.logprob for candidate in top],
                pieces=[candidate.piece for candidate in top],
            )
            for top in piece.top_logprobs
        ],
    )
