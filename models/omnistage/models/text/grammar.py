"""Grammars of llguidance for constrained texts. Without torch: the process that makes grammars on trial needs little memory.

In a JSON schema, white space is only one space after a comma or a colon, so that an answer cannot wander. A regular expression has the
syntax of Rust's `regex` and matches the whole text. A schema with unknown parts is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import assert_never

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from omnistage.models.conversation import TextConstraint

FORMS = ("json_schema", "regex", "choice")
"""All forms of constraints."""

_LIMITS = LLParserLimits(max_grammar_size=100_000, step_lexer_fuel=50_000, max_lexer_states=20_000, verbose_errors=False)
"""Bounds of one grammar as it is used: it adds some milliseconds to a step in the worst case. They do not bound its making, which
`GrammarTrials` does."""

TRIAL_CPU_S = 0.5
"""Seconds of processor time that the making of one grammar may take. The largest schemas that people send take a tenth of it."""
TRIAL_BYTES = 64 << 20
"""Bytes of address space that it may take."""
TRIAL_LIMIT_S = 2.0
"""Seconds by the clock that it may take: on a busy machine, it may get none of the processor."""

_SPACE = " ?"
_FORCED_CHARACTERS = 128
"""If the text can continue in only one way, the library tokenizes this continuation and uses its first token. Only this many characters are
tokenized, because all of them at every step would cost too much."""
_MAX_REASON_CHARACTERS = 200


class UnfitConstraint(ValueError):
    """No grammar can be made of a constraint, or no text fits it. The text says why, and names no field."""


@dataclass(frozen=True)
class TokenPieces:
    """The tokens of a model. pieces: the bytes of each id; b"" for an id that never comes; any name for one of `special`. special: ids that
    no text has. ends: the special ids that end the text."""

    pieces: Sequence[bytes]
    special: Sequence[int]
    ends: Sequence[int]

    @property
    def mask_words(self) -> int:
        """Number of 32-bit words that hold a bit for each id."""
        return -(-len(self.pieces) // 32)

    def tokenizer(self, encode: Callable[[str], Sequence[int]]) -> LLTokenizer:
        """The vocabulary in llguidance's form, for one thread. It takes 0.2 s for 49,152 tokens, 0.6 s for 152,064. encode: turns text into
        ids, for text that can continue in only one way."""
        return LLTokenizer(_Wrapper(self, encode), eos_token=list(self.ends))


class _Wrapper(TokenizerWrapper):
    """The tokenizer in the form that LLTokenizer expects, with attributes under the names that it prescribes."""

    def __init__(self, vocabulary: TokenPieces, encode: Callable[[str], Sequence[int]]) -> None:
        self.tokens, self.special_token_ids = list(vocabulary.pieces), sorted(vocabulary.special)
        self.eos_token_id, self.bos_token_id = vocabulary.ends[0], None
        self.is_tokenizer_wrapper = True
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        return list(self._encode((text if isinstance(text, str) else text.decode())[:_FORCED_CHARACTERS]))


def new_matcher(tokenizer: LLTokenizer, constraint: TextConstraint) -> LLMatcher:
    """A matcher of the texts that keep to a constraint, at their beginning. Raises UnfitConstraint."""
    try:
        source = _source(constraint)
    except ValueError as error:
        raise UnfitConstraint(_reason(str(error))) from None
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=_LIMITS)
    if matcher.is_error():
        raise UnfitConstraint(_reason(matcher.get_error()))
    return matcher


def next_mask(matcher: LLMatcher, words: int) -> NDArray[np.int32]:
    """A bit for each id that may come next, in `words` words; none if the matcher has given up."""
    mask = np.zeros(words, np.int32)
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    if matcher.is_error():
        mask[:] = 0
    return mask


def check_fits_some(mask: NDArray[np.int32]) -> None:
    """Raises UnfitConstraint if this first mask allows no token."""
    if not mask.any():
        raise UnfitConstraint("no text keeps to it")


def _source(constraint: TextConstraint) -> str:
    """The constraint as a grammar in the form that llguidance reads. Raises ValueError for text that is not of this form."""
    match constraint.form:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(constraint.text, overrides={"whitespace_pattern": _SPACE})
        case "regex":
            return LLMatcher.grammar_from_regex(constraint.text)
        case "choice":
            return LLMatcher.grammar_from_regex("|".join(f"({_literal(choice)})" for choice in constraint.choices))
    assert_never(constraint.form)


def _literal(text: str) -> str:
    """A regular expression that matches exactly this text."""
    return "".join(character if character.isascii() and character.isalnum() else f"\\x{{{ord(character):x}}}" for character in text)


def _reason(message: str) -> str:
    """The line of the library's message that names the fault, at most _MAX_REASON_CHARACTERS long. Lines that say where the fault is are
    left out, because the user has not written the grammar."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    first_line = lines[0] if lines else "cannot be read"
    line = next((line for line in lines if line.startswith("error: ")), first_line)
    return line.removeprefix("error: ")[:_MAX_REASON_CHARACTERS]
