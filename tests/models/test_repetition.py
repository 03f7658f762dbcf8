"""An endless repetition: by the tokens of an answer alone, wherever it was cut and went on, and never for less than the bound."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from omnistage.engine.detokenizer import Detokenizer
from omnistage.models.interface import FinishReason, TextPiece
from omnistage.models.text.answer import AnswerAssembler
from omnistage.models.text.repetition import MAX_PERIOD, MIN_TOKENS, Repetition

TOKENS = st.integers(0, 2)
BLOCKS = st.lists(TOKENS, min_size=1, max_size=MAX_PERIOD + 8)
"""Few different tokens, so that a block often has repetitions of its own."""


def is_endless(tokens: Sequence[int]) -> bool:
    """The rule in its shortest words."""
    end = tokens[-MIN_TOKENS:]
    return len(end) == MIN_TOKENS and any(end[period:] == end[:-period] for period in range(1, MAX_PERIOD + 1))


def end_of(tokens: Sequence[int]) -> int | None:
    """After how many of these tokens the rule holds for the first time; None: never."""
    return next((count for count in range(MIN_TOKENS, len(tokens) + 1) if is_endless(tokens[:count])), None)


def watched(tokens: Sequence[int], min_tokens: int = 0) -> int | None:
    """The same by `Repetition`, token by token."""
    repetition = Repetition(min_tokens)
    for count, token in enumerate(tokens, 1):
        repetition.add(token)
        if repetition.is_endless:
            return count
    return None


@given(st.lists(TOKENS, max_size=80), BLOCKS, st.integers(1, 3 * MIN_TOKENS), st.lists(TOKENS, max_size=8))
def test_it_is_found_at_the_first_token_at_which_it_is_there(before: list[int], block: list[int], length: int, after: list[int]) -> None:
    repeated = (block * (length // len(block) + 1))[:length]
    answer = [*before, *repeated, *after]
    assert watched(answer) == end_of(answer)
    if length >= MIN_TOKENS and len(block) <= MAX_PERIOD:
        assert watched(answer) is not None


@given(st.lists(TOKENS, max_size=MIN_TOKENS - 1), st.integers(2, 4), BLOCKS)
def test_it_is_never_less_than_the_bound(answer: list[int], first: int, block: list[int]) -> None:
    """Whatever stands in a short answer, and for a long one whose repetition is broken off in time."""
    assert watched(answer) is None
    broken = (block * MIN_TOKENS)[: MIN_TOKENS - 1]
    marks = [token for number in range(3) for token in (*broken, 10 * first + number)]
    assert watched(marks) is None


@given(st.lists(TOKENS, max_size=40), BLOCKS, st.integers(0, 2 * MIN_TOKENS), st.data())
def test_an_answer_ends_there_wherever_it_was_cut(before: list[int], block: list[int], min_tokens: int, data: st.DataObject) -> None:
    tokens = [*before, *(block * MIN_TOKENS)[: 2 * MIN_TOKENS]]
    end = watched(tokens, min_tokens)
    if end is None:
        return
    assert end == max(end_of(tokens) or 0, min_tokens)
    place = data.draw(st.integers(0, end - 1))
    pieces = [b"a", b"b", "é".encode()[:1]]  # The last is no whole character: its text comes with the end.
    answer = AnswerAssembler(
        Detokenizer(pieces.__getitem__), {"text": place}, history=tokens[:place], repetition=Repetition(min_tokens), row_port="rows"
    )
    for token in tokens[place:]:
        answer.token(token)
    (piece,) = answer.take()
    assert isinstance(piece, TextPiece)
    assert (len(piece.token_ids), piece.finish_reason, answer.complete) == (end - place, FinishReason.REPETITION, True)


NAMES = ["Peter", "Paul", "John", "Mary", "Anna", "Luke", "Mark", "James"]
VERSE = "Row, row, row your boat,\nGently down the stream.\nMerrily, merrily, merrily, merrily,\nLife is but a dream.\n\n"
LEGITIMATE = {
    "say hello 20 times": "\n".join(["Hello!"] * 20),
    "ha ha": " ".join(["ha"] * 100),
    "a hundred words": " ".join(["banana"] * 100),
    "a line of a punishment": "All work and no play makes Jack a dull boy.\n" * 20,
    "a song": VERSE * 5,
    "a litany": "".join(f"Saint {name}, pray for us.\n" for name in NAMES * 3),
    "a song that counts down": "".join(
        f"{n} bottles of beer on the wall.\nTake one down, {n - 1} bottles of beer.\n" for n in range(99, 60, -1)
    ),
    "a count": "\n".join(map(str, range(200))),
    "a list": "\n".join(f"{n}. Hello!" for n in range(1, 60)),
    "a table": "".join(f"| {a} x {b} | {a * b} |\n" for a in range(1, 9) for b in range(1, 9)),
    "code": "".join(f"    if x == {n}:\n        return True\n" for n in range(30)) + "        }\n" * 10 + 'print("hello")\n' * 20,
    "an empty table": "|   |   |   |   |\n" * 20,
    "a matrix": "[0, 0, 0, 0, 0, 0, 0, 0],\n" * 8,
}


@pytest.mark.parametrize("name", LEGITIMATE)
def test_what_people_ask_for_is_no_endless_repetition(default_model: Path, name: str) -> None:
    """As the tokens of the model that is watched."""
    tokenizer = Tokenizer.from_file(str(default_model / "thinker" / "tokenizer.json"))
    assert watched(tokenizer.encode(LEGITIMATE[name]).ids) is None
