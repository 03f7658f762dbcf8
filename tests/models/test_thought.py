"""The thoughts of a model before it answers: where they begin and end, which part of them is text, and that they have no rows."""

from __future__ import annotations

import random

import numpy as np
import pytest

from omnistage.engine.detokenizer import Detokenizer
from omnistage.models.interface import BadRequest, FinishReason, TensorRows, TextPiece
from omnistage.models.text.answer import AnswerAssembler, Marks, Thought

PIECES = [b"<think>", b"</think>", b"\n", b"\n\n", b" red", b" green", "é".encode()[:1], "é".encode()[1:], b"a", b"b\n"]
OPENS, CLOSES, LINE, LINES, RED, GREEN, HALF, OTHER_HALF, A, B = range(len(PIECES))
OPENED, FREE = Marks(OPENS, CLOSES, is_open=True), Marks(OPENS, CLOSES, is_open=False)


def row(place: int) -> np.ndarray:
    """The row of the token at a place: its numbers are the place."""
    return np.full((1, 2), place, np.float32)


class ThoughtPieces:
    """All that came of an answer. told: of each piece of text, whether it was thought."""

    def __init__(self) -> None:
        self.thought, self.text, self.rows = "", "", list[int]()
        self.tokens: dict[bool, list[int]] = {True: [], False: []}
        self.logprobs: dict[bool, list[float]] = {True: [], False: []}
        self.reason: FinishReason | None = None

    def take(self, answer: AnswerAssembler) -> None:
        for piece in answer.take():
            if isinstance(piece, TensorRows):
                self.rows += piece.rows[:, 0].astype(int).tolist() if len(piece.rows) else []
                continue
            assert isinstance(piece, TextPiece) and not (piece.text and piece.thought)
            is_thought = piece.thought is not None
            assert not is_thought or not self.tokens[False], "a thought behind the answer"
            self.thought += piece.thought or ""
            self.text += piece.text
            self.tokens[is_thought] += piece.token_ids
            self.logprobs[is_thought] += piece.logprobs
            self.reason = piece.finish_reason


def assembler(marks: Marks, *, stop: tuple[str, ...] = (), rows: bool = False, **given: object) -> AnswerAssembler:
    wanted = {"text": 0, "rows": 0} if rows else {"text": 0}
    thought = Thought(marks, PIECES.__getitem__)
    return AnswerAssembler(Detokenizer(PIECES.__getitem__, stop), wanted, row_port="rows", thought=thought, **given)  # type: ignore[arg-type]


def told(marks: Marks, tokens: list[int], *, every: int = 1, reason: FinishReason = FinishReason.STOP, **given: object) -> ThoughtPieces:
    """The outputs of an answer that is taken after each `every`-th token."""
    answer, heard = assembler(marks, **given), ThoughtPieces()  # type: ignore[arg-type]
    for place, token in enumerate(tokens):
        answer.token(token, -float(place))
        answer.rows_at(place, row(place))
        if place % every == every - 1:
            heard.take(answer)
    answer.end(reason)
    heard.take(answer)
    return heard


THINKS = [LINE, RED, LINE, HALF, OTHER_HALF, LINE, CLOSES, LINES, GREEN, A]


@pytest.mark.parametrize("every", [1, 3, 100])
def test_a_thought_that_the_prompt_began_is_told_apart(every: int) -> None:
    heard = told(OPENED, THINKS, every=every, rows=True)
    assert (heard.thought, heard.text, heard.reason) == (" red\né", " greena", FinishReason.STOP)
    assert (heard.tokens[True], heard.tokens[False]) == (THINKS[:8], THINKS[8:])
    assert heard.logprobs == {True: [-float(place) for place in range(8)], False: [-8.0, -9.0]}
    assert heard.rows == [8, 9]


def test_a_thought_that_the_model_begins_is_told_apart() -> None:
    heard = told(FREE, [OPENS, *THINKS], rows=True)
    assert (heard.thought, heard.text, heard.rows) == (" red\né", " greena", [9, 10])


def test_a_model_may_begin_again_what_the_prompt_began() -> None:
    heard = told(OPENED, [OPENS, *THINKS])
    assert (heard.thought, heard.text) == (" red\né", " greena")


def test_an_answer_without_a_thought_is_all_of_it() -> None:
    heard = told(FREE, [LINE, RED, OPENS, CLOSES, A], rows=True)
    assert (heard.thought, heard.text, heard.rows) == ("", "\n red<think></think>a", [0, 1, 2, 3, 4])


def test_an_empty_thought_leaves_the_answer() -> None:
    heard = told(OPENED, [LINES, CLOSES, LINES, A, CLOSES])
    assert (heard.thought, heard.text, heard.tokens[True]) == ("", "a</think>", [LINES, CLOSES, LINES])


def test_a_thought_that_is_cut_is_no_answer() -> None:
    heard = told(OPENED, [RED, LINE, HALF], reason=FinishReason.LENGTH, rows=True)
    assert (heard.thought, heard.text, heard.reason, heard.rows) == (" red\n�", "", FinishReason.LENGTH, [])


def test_a_thought_may_be_as_long_as_the_answer_may() -> None:
    answer, heard = assembler(OPENED, max_tokens=2), ThoughtPieces()
    for token in (RED, GREEN):
        answer.token(token)
    heard.take(answer)
    assert (answer.ended, heard.thought, heard.text, heard.reason) == (True, " red green", "", FinishReason.LENGTH)


def test_a_stop_string_is_not_looked_for_in_a_thought() -> None:
    heard = told(OPENED, [RED, CLOSES, LINE, A, RED, A], stop=(" red", "\n"), rows=True)
    assert (heard.thought, heard.text, heard.reason) == (" red", "a", FinishReason.STOP)
    assert heard.rows == [3]


def test_line_ends_behind_a_thought_are_kept_where_the_answer_is_kept_to_something() -> None:
    thought = Thought(OPENED, PIECES.__getitem__, is_laid_out=False)
    assert [thought.take(token) for token in (RED, CLOSES, LINE)] == [" red", "", None]


@pytest.mark.parametrize("marks", [OPENED, FREE], ids=["begun by the prompt", "begun by the model"])
@pytest.mark.parametrize("is_made", [True, False], ids=["rows of ids", "rows that come"])
def test_an_answer_goes_on_anywhere_as_if_it_had_not_stopped(marks: Marks, is_made: bool, seed: int) -> None:
    rng = random.Random(seed)
    tokens = [*([] if marks.is_open else [OPENS]), *THINKS, *rng.choices(range(len(PIECES)), k=8)]
    row_of = row if is_made else None
    whole = told(marks, tokens, rows=True, row_of=row_of)
    for cut in range(len(tokens)):
        begin = told(marks, tokens[:cut])
        answer, rest = assembler(marks, rows=True, history=tokens[:cut], row_of=row_of), ThoughtPieces()
        for place, token in enumerate(tokens):
            if place >= cut:
                answer.token(token)
            answer.rows_at(place, row(place))
        answer.end(FinishReason.STOP)
        rest.take(answer)
        thinking = answer_thinks(marks, tokens[:cut])
        assert rest.rows == whole.rows and rest.text == whole.text[len(answer_text(marks, tokens[:cut])) :]
        assert [*begin.tokens[thinking], *rest.tokens[thinking]] == whole.tokens[thinking]


def answer_text(marks: Marks, tokens: list[int]) -> str:
    """The part of the text that is out after these tokens."""
    answer, heard = assembler(marks), ThoughtPieces()
    for token in tokens:
        answer.token(token)
    heard.take(answer)
    return heard.text


def answer_thinks(marks: Marks, tokens: list[int]) -> bool:
    return not told(marks, tokens).tokens[False]


def test_rows_are_wanted_from_tokens_of_the_answer_alone() -> None:
    thought = Thought(OPENED, PIECES.__getitem__)
    with pytest.raises(BadRequest):
        AnswerAssembler(Detokenizer(PIECES.__getitem__), {"rows": 2}, history=THINKS[:9], row_port="rows", thought=thought)
