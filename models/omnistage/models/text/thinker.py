"""The shared part of Thinkers on the engine: checking requests, tokenizing on a thread, sending verbatim text, and answering."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

from omnistage.engine.detokenizer import Detokenizer
from omnistage.engine.engine import Engine
from omnistage.engine.request import Constraint, Prompt, SequenceRequest
from omnistage.models.conversation import Part, Turn
from omnistage.models.interface import (
    BadRequest,
    Content,
    FinishReason,
    Full,
    Load,
    ModelInfo,
    Piece,
    TensorRows,
    TextPiece,
    TextRequest,
    Wanted,
    inputs_of,
)
from omnistage.models.ranks.team import Team
from omnistage.models.requests import check_constraint, check_parts, refuse_unfit
from omnistage.models.text.answer import AnswerAssembler, Thought, answer_pieces
from omnistage.models.text.chat import TextTokenizer
from omnistage.models.text.constraint import Constraints, refuse_dead_ends
from omnistage.models.text.engine_model import EngineModel, array_of
from omnistage.models.turns import WaitingPlaces
from omnistage.models.worker import Worker

TEXT = "text"

USUAL_TOKENS = 512
"""Largest number of tokens of an answer if neither the request nor the pipeline sets it."""

_PIECE_TOKENS = 8
"""Number of tokens of verbatim text in a piece."""
MAX_WAITING = 1024
"""Largest number of texts that wait to be tokenized. A text takes a second at most, where the context has 32,768 tokens."""
_MAX_TOKEN_CHARACTERS = 8
"""A text with more characters than this for each token of the context is refused before it is tokenized, which takes time. English has
about 4.5 characters per token of a usual vocabulary. The longest tokens, such as 80 spaces, are too rare to matter."""


@dataclass(frozen=True, slots=True)
class Tokenized:
    """A request and its tokens. prompt_ids: tokens of the conversation; empty for verbatim text if the model makes no rows. said_ids:
    tokens of verbatim text; empty: the model writes the answer."""

    request: TextRequest
    prompt_ids: tuple[int, ...]
    said_ids: tuple[int, ...]


P = TypeVar("P", bound=Tokenized)


class EngineThinker(EngineModel, ABC, Generic[P]):
    """A Thinker on the engine; implements `ThinkerModel` except the abstract methods, which each family implements."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: TextTokenizer,
        info: ModelInfo,
        context: int,
        workers: Sequence[Worker] = (),
        team: Team | None = None,
    ) -> None:
        """context: tokens that a conversation and its answer may have together. workers: threads of the family, apart from the threads of
        the engine, the tokenizer and the grammars. team: the other ranks, see EngineModel. The model closes workers and team."""
        self._worker = Worker("tokenizer", threads=1)
        self._turns = WaitingPlaces(1, MAX_WAITING, lambda waiting: Full(f"{waiting} texts wait to be tokenized: ask again later"))
        super().__init__(engine, info, [self._worker, *workers], team)
        self.tokenizer, self._context = tokenizer, context
        self._banned = tokenizer.unsayable - tokenizer.ends
        self._never_said = tokenizer.unsayable | tokenizer.ends
        self._has_rows = any(port.content is Content.TENSOR for port in info.produces)
        marks = (tokenizer.thinks.opens, tokenizer.thinks.closes) if tokenizer.thinks else ()
        self._constraints = Constraints(
            tokenizer.piece,
            tokenizer.encode,
            # A constrained text may have the characters of the marks, never the tokens, which would make a part of it a thought.
            special={*tokenizer.special.values(), *marks},
            end_ids=sorted(tokenizer.ends),
            vocabulary=tokenizer.vocabulary,
        )
        self.threads = (*self.threads, self._constraints.activity)

    def load(self) -> Load:
        """See Model.load. Requests that wait to be tokenized count as waiting too."""
        load = super().load()
        return replace(load, queued=load.queued + self._worker.queued + self._turns.waiting)

    async def warm_up(self) -> None:
        """Answer one short question: this touches every weight, and leaves the default system prompt in the prefix cache."""
        await self._answer_once("Hello!")

    async def _answer_once(self, *parts: Part) -> None:
        """Answer one short question that has these parts, and drop the answer."""
        await self._constraints.warm_up()
        prepared = await self.prepare(TextRequest((Turn("user", parts),), seed=0, max_tokens=4))
        async with aclosing(self.generate(prepared, inputs_of(), {TEXT: 0})) as pieces:
            async for _ in pieces:
                pass

    async def close(self) -> None:
        await super().close()
        await self._constraints.close()

    # Before the run --------------------------------------------------------------------------------------------------------------------

    async def prepare(self, request: TextRequest) -> P:
        """See ThinkerModel.prepare. Characters are counted first; then the grammar is made, then a thread tokenizes the text. Clients take
        turns at both."""
        self._check(request)
        thinks = None if request.verbatim else self.tokenizer.thinks
        grammar = await self._constraints.of(request, thinks if thinks and thinks.is_open else None)
        async with self._turns.hold(request.client):
            return await self._worker.run(partial(self._tokenized, request, grammar))

    def _check(self, request: TextRequest) -> None:
        """Check everything about a request that needs no tokens. Raises BadRequest."""
        check_parts(request, self.info)
        check_constraint(request, self.info)
        if request.verbatim and any(not isinstance(part, str) for turn in request.turns for part in turn.parts):
            raise BadRequest(
                "thinker.messages.parts.media", "text that is given is said as it is: leave the media out, or thinker.verbatim"
            )
        vocabulary = self.tokenizer.vocabulary
        if not all(0 <= token_id < vocabulary for token_id in request.history):
            raise BadRequest("resume.history", f"token ids must be below {vocabulary}")
        if never := self._never_said.intersection(request.history):
            description = (
                f"token {min(never)} is in no answer: it is special, no text, or ends one; give the tokens that came, and those alone"
            )
            raise BadRequest("resume.history", description)
        self._check_characters("thinker.verbatim", len(request.verbatim))
        self._check_characters("thinker.messages", sum(len(turn.text) for turn in request.turns))

    def _check_characters(self, field: str, count: int) -> None:
        """Raises BadRequest for a text with more characters than the context can have. field: of the request, for the error."""
        max_characters = self._context * _MAX_TOKEN_CHARACTERS
        if count > max_characters:
            raise BadRequest(field, f"shorten the text: it has {count} characters, the model takes at most {max_characters}")

    def _tokenized(self, request: TextRequest, grammar: Constraint | None) -> P:
        """The request with its tokens. grammar: its constraint; None: the text is free. Raises BadRequest for faults that only tokens
        show."""
        said_ids = self.tokenizer.encode(request.verbatim) if request.verbatim else ()
        if said_ids and request.history != said_ids[: len(request.history)]:
            raise BadRequest("resume.history", "the tokens are not those of thinker.verbatim")
        if said_ids and not self._has_rows:
            return self._prepared(request, (), said_ids, grammar)
        # The rows of verbatim text without a question are computed like the rows of an answer to an empty question.
        prompt_ids = self.prompt(request.turns or (Turn("user", ("",)),))
        if len(prompt_ids) >= self._context:
            raise BadRequest(
                "thinker.messages", f"shorten the conversation: it has {len(prompt_ids)} tokens, the model takes {self._context - 1}"
            )
        if (room := self._context - len(prompt_ids)) < len(said_ids):
            raise BadRequest("thinker.verbatim", f"shorten the text: it has {len(said_ids)} tokens, the conversation has room for {room}")
        return self._prepared(request, prompt_ids, said_ids, grammar)

    @abstractmethod
    def prompt(self, turns: Sequence[Turn]) -> tuple[int, ...]:
        """Token ids of a conversation, up to the beginning of the assistant's answer. Raises BadRequest."""

    @abstractmethod
    def _prepared(self, request: TextRequest, prompt_ids: tuple[int, ...], said_ids: tuple[int, ...], grammar: Constraint | None) -> P:
        """The argument of `_begin` for a request, made on the tokenizer's thread. prompt_ids, said_ids: as in Tokenized. Raises
        BadRequest."""

    def _thought(self, request: TextRequest) -> Thought | None:
        """The thought before the answer to a request; None: there cannot be a thought."""
        marks = None if request.verbatim else self.tokenizer.thinks
        return None if marks is None else Thought(marks, self.tokenizer.piece, is_laid_out=request.constraint is None)

    def _make_request(
        self,
        request: TextRequest,
        grammar: Constraint | None,
        prompt: Prompt,
        items: int,
        *,
        said_ids: tuple[int, ...] = (),
        taps_from: int | None = None,
    ) -> SequenceRequest:
        """The request to the engine. items: largest number of items of the answer. said_ids: tokens of verbatim text, which become the
        history, so that their rows are computed; one more item is drawn, and dropped. taps_from: see SequenceRequest. Raises Unfit."""
        return SequenceRequest(
            prompt=prompt,
            seed=request.seed,
            max_items=len(said_ids) + 1 if said_ids else items,
            sampling=request.sampling,
            min_items=request.min_tokens,
            end_ids=self.tokenizer.ends,
            ignore_end=request.ignore_eos,
            # A special token in an answer would begin another turn of the conversation.
            banned=self._banned,
            logprobs=request.logprobs,
            top_logprobs=request.top_logprobs,
            tokenless=self.tokenizer.tokenless,
            history=tuple((token_id,) for token_id in said_ids or request.history),
            constraint=grammar,
            taps_from=taps_from,
            client=request.client,
        )

    # The run ---------------------------------------------------------------------------------------------------------------------------

    async def generate(self, prepared: P, inputs: AsyncIterator[Piece], ports: Wanted) -> AsyncGenerator[TextPiece | TensorRows, None]:
        """Yields pieces of the answer as they are ready. The engine makes at most `sequence.MAX_UNREAD` tokens ahead of the reader. The ids
        are without the token that ends the text; the tokens of a stop string are among the ids, but not its text."""
        # Verbatim text needs the engine only for its rows.
        pieces = self._say(prepared, ports) if prepared.said_ids and ports.keys() == {TEXT} else self._think(prepared, inputs, ports)
        async with aclosing(pieces):
            async for piece in pieces:
                yield piece

    async def _say(self, prepared: P, ports: Wanted) -> AsyncGenerator[TextPiece | TensorRows, None]:
        """Yields verbatim text whose rows are not wanted, without the engine."""
        request = prepared.request
        detokenizer = Detokenizer(self.tokenizer.piece)
        assemble = partial(AnswerAssembler, detokenizer, ports, history=request.history, finished=request.finished)
        answer = await self._worker.run(assemble)
        for piece in _verbatim_pieces(answer, prepared):
            yield piece

    async def _think(self, prepared: P, inputs: AsyncIterator[Piece], ports: Wanted) -> AsyncGenerator[TextPiece | TensorRows, None]:
        """Yields an answer of the engine, or verbatim text with its rows."""
        answer, engine_request = await self._begin(prepared, inputs, ports)
        answer.asked_with(len(engine_request.prompt))
        with refuse_unfit("thinker"):
            submitted = self.engine.submit(engine_request)
        async with aclosing(submitted) as stream, aclosing(answer_pieces(stream, answer, array_of)) as pieces:
            for piece in _verbatim_pieces(answer, prepared):
                yield piece
            with refuse_dead_ends():
                async for piece in pieces:
                    yield piece

    @abstractmethod
    async def _begin(self, prepared: P, inputs: AsyncIterator[Piece], ports: Wanted) -> tuple[AnswerAssembler, SequenceRequest]:
        """(the answer up to the end of its history, the request to the engine). A long history is assembled on a thread. This is not called
        for verbatim text whose rows are not wanted. The engine checks the request later. Raises BadRequest or Full."""


def _verbatim_pieces(answer: AnswerAssembler, prepared: Tokenized) -> Iterator[TextPiece | TensorRows]:
    """Yields the pieces of verbatim text after the history, and the end of the text; yields nothing without verbatim text."""
    rest = prepared.said_ids[len(prepared.request.history) :]
    for first in range(0, len(rest), _PIECE_TOKENS):
        for token_id in rest[first : first + _PIECE_TOKENS]:
            answer.token(token_id)
        yield from answer.take()
    if prepared.said_ids:
        answer.end(FinishReason.STOP)
        yield from answer.take()
