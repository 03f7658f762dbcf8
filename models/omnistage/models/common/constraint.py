"""Text that is restricted, token by token, to a JSON schema, a regular expression or one of some choices, for any tokenizer.

`grammar` makes the grammars; `grammar_trial` first has another process make each one, which may be killed. Every request has its own
grammar. A grammar grows as it is used: if requests shared it, this growth would count against the bounds of the next request, and would
reveal to one client what another client has asked.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial

import numpy as np
import structlog
import torch
from llguidance import LLMatcher, LLTokenizer

from omnistage.engine.request import Constraint as EngineConstraint
from omnistage.engine.request import DeadEnd, Walk
from omnistage.models.common.grammar import TokenPieces, UnfitConstraint, new_matcher, next_mask
from omnistage.models.common.grammar_trial import GrammarTrials
from omnistage.models.common.thought import Marks
from omnistage.models.common.worker import Worker
from omnistage.models.conversation import TextConstraint
from omnistage.models.interface import BadRequest, Full, TextRequest

log = structlog.get_logger(__name__)

_FIELD = "thinker.constraint"
_HISTORY_PIECE = 256
"""Number of tokens of a history that the matcher gets in one call."""


def _field(constraint: TextConstraint) -> str:
    return f"{_FIELD}.{constraint.form}"


class Grammar:
    """A constraint as llguidance checks it; implements `engine.constraint.Constraint`. matcher: has read the history of the request; each
    walk gets a copy. ends: bits of the tokens that end a text, as in `Walk.allowed`. vocabulary: number of ids."""

    def __init__(self, matcher: LLMatcher, ends: torch.Tensor, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self._matcher, self._ends = matcher, ends

    def read(self, tokens: Sequence[int]) -> bool:
        """Go on behind these tokens; returns whether they keep to the constraint. Call it before the first walk."""
        return self._matcher.try_consume_tokens(list(tokens)) == len(tokens)

    def begin(self) -> GrammarWalk:
        return GrammarWalk(self, self._matcher.deep_copy(), self._ends)


class GrammarWalk:
    """Implements `engine.constraint.Walk`. grammar: counts as used as long as one of its walks. ends: bits of the tokens that end a text.
    `_allowed`: result of `allowed`; None: not computed yet."""

    def __init__(self, grammar: Grammar, matcher: LLMatcher, ends: torch.Tensor) -> None:
        self._grammar, self._matcher, self._ends = grammar, matcher, ends
        self._allowed: torch.Tensor | None = None

    @property
    def complete(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def must_end(self) -> bool:
        allowed = self.allowed()
        return bool(allowed.any()) and not bool((allowed & ~self._ends).any())

    def allowed(self) -> torch.Tensor:
        if self._allowed is None:
            self._allowed = torch.from_numpy(next_mask(self._matcher, len(self._ends)))
        return self._allowed

    def note(self, token_id: int) -> None:
        # If the token cannot continue the text, the matcher notes that and allows nothing.
        self._matcher.consume_token(token_id)
        self._allowed = None


class AfterThought:
    """Implements `engine.constraint.Constraint`: allows any text until the thought ends, then text that `constraint` allows. ends: ids that
    end an answer; they may not come within a thought."""

    def __init__(self, constraint: EngineConstraint, marks: Marks, ends: Sequence[int]) -> None:
        self._constraint, self._marks, self._ends = constraint, marks, ends
        self.vocabulary = constraint.vocabulary

    def begin(self) -> Walk:
        """A walk at the beginning of a thought, where every token may come except `ends`."""
        free = np.zeros(-(-self.vocabulary // 32) * 32, bool)
        free[: self.vocabulary] = True
        free[list(self._ends)] = False
        bits = torch.from_numpy(np.packbits(free, bitorder="little").view(np.int32))
        return _ThinkingWalk(self._constraint.begin(), self._marks.closes, bits)


class _ThinkingWalk:
    """Implements `engine.constraint.Walk` for a thought and the answer after it. walk: for the answer. closes: id of the token that ends
    the thought. free: bits of the tokens that may come within the thought."""

    def __init__(self, walk: Walk, closes: int, free: torch.Tensor) -> None:
        self._walk, self._closes, self._free = walk, closes, free
        self._is_over = False

    @property
    def complete(self) -> bool:
        return self._is_over and self._walk.complete

    @property
    def must_end(self) -> bool:
        return self._is_over and self._walk.must_end

    def allowed(self) -> torch.Tensor:
        return self._walk.allowed() if self._is_over else self._free

    def note(self, token_id: int) -> None:
        if self._is_over:
            self._walk.note(token_id)
        self._is_over |= token_id == self._closes


class Constraints:
    """Makes grammars for one vocabulary, on a thread of its own. piece: returns the bytes of an id; b"" for an id without a token; not
    called for special ids. encode: turns text into ids, for text that can continue in only one way. special: ids that no text has. end_ids:
    the special ids that end the text. vocabulary: number of ids in the decoder's head."""

    def __init__(
        self,
        piece: Callable[[int], bytes],
        encode: Callable[[str], Sequence[int]],
        *,
        special: Collection[int],
        end_ids: Sequence[int],
        vocabulary: int,
    ) -> None:
        self._piece, self._encode = piece, encode
        self._special, self._end_ids, self._size = frozenset(special), end_ids, vocabulary
        self._trials = GrammarTrials(lambda: self._vocabulary)
        self._worker = Worker("grammars", threads=1)
        self.activity = self._worker.activity

    async def of(self, request: TextRequest, thinks: Marks | None = None) -> EngineConstraint | None:
        """The constraint of a request's text after its history; None: the text is free. thinks: marks of the thought with which the answer
        begins, which is not constrained. Raises BadRequest or Full."""
        if request.constraint is None or request.verbatim or request.finished is not None:
            return None
        answered = request.history if thinks is None else thinks.answer_tokens(request.history)
        grammar = await self._tried(request.constraint, request.client)
        await self._read(grammar, answered or (), _field(request.constraint))
        return grammar if thinks is None or answered is not None else AfterThought(grammar, thinks, self._end_ids)

    async def warm_up(self) -> None:
        """Make what all grammars share before any request needs it, because that takes long."""
        await self._worker.run(lambda: self._tokenizer)
        try:
            await self._trials.start()
        except Full as error:  # Free answers need no grammars, and the next constraint starts the process.
            log.warning("grammars.not_started", why=str(error))

    async def close(self) -> None:
        await self._trials.close()
        await self._worker.close()

    async def _tried(self, constraint: TextConstraint, client: str) -> Grammar:
        """The grammar of a constraint, which was made on trial before. Raises BadRequest or Full."""
        try:
            return await self._trials.make(constraint, client, lambda: self._worker.run(partial(self._grammar, constraint)))
        except UnfitConstraint as error:
            raise BadRequest(_field(constraint), str(error)) from None

    async def _read(self, grammar: Grammar, history: Sequence[int], field: str) -> None:
        """Have the grammar read the tokens of a history; others have their turns between pieces of it. Raises BadRequest."""
        for at in range(0, len(history), _HISTORY_PIECE):
            if not await self._worker.run(partial(grammar.read, history[at : at + _HISTORY_PIECE])):
                raise BadRequest("resume.history", f"the tokens do not keep to {field}")

    @cached_property
    def _vocabulary(self) -> TokenPieces:
        pieces = [f"<special {number}>".encode() if number in self._special else self._piece(number) for number in range(self._size)]
        return TokenPieces(pieces, sorted(self._special), self._end_ids)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """The vocabulary for llguidance, which only the worker touches."""
        return self._vocabulary.tokenizer(self._encode)

    @cached_property
    def _ends(self) -> torch.Tensor:
        """Bits of the tokens that end a text, as in `Walk.allowed`."""
        bits = np.zeros(32 * self._vocabulary.mask_words, bool)
        bits[list(self._end_ids)] = True
        return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))

    def _grammar(self, constraint: TextConstraint) -> Grammar:
        return Grammar(new_matcher(self._tokenizer, constraint), self._ends, self._size)


@contextmanager
def refuse_dead_ends() -> Iterator[None]:
    """Used around an answer of an engine: raises BadRequest if the constraint allows no further token. That is the fault of the request,
    however late it shows."""
    try:
        yield
    except DeadEnd as error:
        raise BadRequest(_FIELD, str(error)) from None
