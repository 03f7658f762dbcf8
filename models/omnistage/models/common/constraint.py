"""Text that is restricted, token by token, to a JSON schema, a regular expression or one of some choices, for any tokenizer.

The library llguidance makes the grammars. In a JSON schema, white space is only one space after a comma or a colon, so that an answer
cannot wander. A regular expression has the syntax of Rust's `regex` and matches the whole text. A schema with unknown parts is refused.
Every request has its own grammar. A grammar grows as it is used: if requests shared it, this growth would count against the bounds of the
next request, and would reveal to one client what another client has asked.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from omnistage.engine.constraint import Constraint as EngineConstraint
from omnistage.engine.constraint import Walk
from omnistage.engine.request import DeadEnd
from omnistage.models.common.thought import Marks
from omnistage.models.common.worker import Worker
from omnistage.models.conversation import TextConstraint
from omnistage.models.interface import BadRequest, TextRequest

FORMS = ("json_schema", "regex", "choice")
"""All forms of constraints that `Constraints` supports."""

_FIELD = "thinker.constraint"
_LIMITS = LLParserLimits(max_grammar_size=100_000, step_lexer_fuel=50_000, max_lexer_states=20_000, verbose_errors=False)
"""Bounds of one grammar: it takes at most about 10 MB, and adds some milliseconds to a step in the worst case."""

_SPACE = " ?"
_HISTORY_PIECE = 256
"""Number of tokens of a history that the matcher gets in one call."""
_FORCED_CHARACTERS = 128
"""If the text can continue in only one way, the library tokenizes this continuation and uses its first token. Only this many characters are
tokenized, because all of them at every step would cost too much."""
_MAX_REASON_CHARACTERS = 200


class Grammar:
    """A constraint as llguidance checks it; implements `engine.constraint.Constraint`. matcher: has read the history of the request; each
    walk gets a copy. ends: bits of the tokens that end a text, as in `Walk.allowed`. vocabulary: number of ids."""

    def __init__(self, matcher: LLMatcher, ends: torch.Tensor, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self._matcher, self._ends = matcher, ends

    def begin(self) -> GrammarWalk:
        return GrammarWalk(self._matcher.deep_copy(), self._ends)


class GrammarWalk:
    """Implements `engine.constraint.Walk`. ends: bits of the tokens that end a text. `_allowed`: result of `allowed`; None: not computed
    yet."""

    def __init__(self, matcher: LLMatcher, ends: torch.Tensor) -> None:
        self._matcher, self._ends = matcher, ends
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
            words = np.zeros(len(self._ends), np.int32)
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            if self._matcher.is_error():
                words[:] = 0
            self._allowed = torch.from_numpy(words)
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
        self._special, self._end_ids, self._vocabulary = frozenset(special), end_ids, vocabulary
        self._worker = Worker("grammars", threads=1)
        self.activity = self._worker.activity

    async def of(self, request: TextRequest, thinks: Marks | None = None) -> EngineConstraint | None:
        """The constraint of a request's text after its history; None: the text is free. thinks: marks of the thought with which the answer
        begins, which is not constrained. Raises BadRequest."""
        if request.constraint is None or request.verbatim or request.finished is not None:
            return None
        answered = request.history if thinks is None else thinks.answer_tokens(request.history)
        grammar = await self._worker.run(partial(self._grammar, request.constraint, answered or ()))
        return grammar if thinks is None or answered is not None else AfterThought(grammar, thinks, self._end_ids)

    async def warm_up(self) -> None:
        """Make what all grammars share before any request needs it, because that takes long."""
        await self._worker.run(lambda: self._tokenizer)

    async def close(self) -> None:
        await self._worker.close()

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """The tokenizer in llguidance's form, which only the worker touches. Making it takes 0.2 s for 49,152 tokens, 0.6 s for 152,064."""
        return LLTokenizer(_Vocabulary(self._pieces(), self._special, self._end_ids[0], self._encode), eos_token=list(self._end_ids))

    def _pieces(self) -> list[bytes]:
        """The bytes of each id. A special id is no text and gets any name; an id without bytes is never allowed."""
        return [
            f"<special {token_id}>".encode() if token_id in self._special else self._piece(token_id) for token_id in range(self._vocabulary)
        ]

    @cached_property
    def _ends(self) -> torch.Tensor:
        """Bits of the tokens that end a text, as in `Walk.allowed`."""
        bits = np.zeros(-(-self._vocabulary // 32) * 32, bool)
        bits[list(self._end_ids)] = True
        return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))

    def _grammar(self, constraint: TextConstraint, history: Sequence[int]) -> Grammar:
        """The grammar of a constraint, after the tokens of a history. Raises BadRequest if no text fits it, or if this history does not."""
        field = f"{_FIELD}.{constraint.form}"
        try:
            source = _source(constraint)
        except ValueError as error:
            raise BadRequest(field, _reason(str(error))) from None
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise BadRequest(field, _reason(matcher.get_error()))
        grammar = Grammar(matcher, self._ends, self._vocabulary)
        if not grammar.begin().allowed().any():
            raise BadRequest(field, "no text keeps to it")
        for at in range(0, len(history), _HISTORY_PIECE):
            piece = list(history[at : at + _HISTORY_PIECE])
            if matcher.try_consume_tokens(piece) < len(piece):
                raise BadRequest("resume.history", f"the tokens do not keep to {field}")
        return grammar


class _Vocabulary(TokenizerWrapper):
    """The tokenizer in the form that LLTokenizer expects, with attributes under the names that it prescribes."""

    def __init__(self, pieces: Sequence[bytes], special: Collection[int], end_id: int, encode: Callable[[str], Sequence[int]]) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id, self.bos_token_id = pieces, sorted(special), end_id, None
        self.is_tokenizer_wrapper = True
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        return list(self._encode((text if isinstance(text, str) else text.decode())[:_FORCED_CHARACTERS]))


def _source(constraint: TextConstraint) -> str:
    """The constraint as a grammar in the form that llguidance reads. Raises ValueError for text that is not of this form."""
    match constraint.form:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(constraint.text, overrides={"whitespace_pattern": _SPACE})
        case "regex":
            return LLMatcher.grammar_from_regex(constraint.text)
    return LLMatcher.grammar_from_regex("|".join(f"({_literal(choice)})" for choice in constraint.choices))


def _literal(text: str) -> str:
    """A regular expression that matches exactly this text."""
    return "".join(character if character.isascii() and character.isalnum() else f"\\x{{{ord(character):x}}}" for character in text)


def _reason(message: str) -> str:
    """The line of the library's message that names the fault, at most _MAX_REASON_CHARACTERS long. Lines that say where the fault is are
    left out, because the user has not written the grammar."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    line = next((line for line in lines if line.startswith("error: ")), lines[0] if lines else "cannot be read")
    return line.removeprefix("error: ")[:_MAX_REASON_CHARACTERS]


@contextmanager
def refuse_dead_ends() -> Iterator[None]:
    """Used around an answer of an engine: raises BadRequest if the constraint allows no further token. That is the fault of the request,
    however late it shows."""
    try:
        yield
    except DeadEnd as error:
        raise BadRequest(_FIELD, str(error)) from None
