"""The text of an answer and its rows: a row goes out when the text of its token is final, and what a stop string cut off has none; and the
thoughts of a model before it answers: where they begin and end, which part of them is text, and that they have no rows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnistage.engine.detokenizer import Detokenizer
from omnistage.models.interface import BadRequest, FinishReason, TensorRows, TextPiece
from omnistage.models.text.answer import AnswerAssembler, Marks, Thought

WORDS = [" red", " green", " blue", ".", "\n", " a", "bc", "", "\U0001f600", "é"]
PIECES = [*(word.encode() for word in WORDS), *(bytes([byte]) for byte in "é\U0001f600".encode())]
"""Words, and single bytes of characters of several."""

BOTH = {"text": 0, "rows": 0}


def answer_of(wanted: dict[str, int], stop: Sequence[str] = (), **options: Any) -> AnswerAssembler:
    return AnswerAssembler(Detokenizer(PIECES.__getitem__, stop), wanted, row_port="rows", **options)


def row(place: int) -> np.ndarray:
    """The row of the token at a place says the place."""
    return np.full((1, 2), place, np.float32)


class HeardAnswer:
    """The outputs of an answer, and those of the thought before it."""

    def __init__(self) -> None:
        self.text, self.tokens, self.logprobs, self.rows = "", list[int](), list[float](), list[int]()
        self.thought, self.thought_tokens, self.thought_logprobs = "", list[int](), list[float]()
        self.reason: FinishReason | None = None
        self.rows_ended = False

    def take(self, answer: AnswerAssembler) -> None:
        for piece in answer.take():
            if isinstance(piece, TextPiece):
                assert self.reason is None, "text after its end"
                if piece.thought is None:
                    self.text += piece.text
                    self.tokens += piece.token_ids
                    self.logprobs += piece.logprobs
                else:
                    assert not piece.text and not self.tokens, "a thought behind the answer"
                    self.thought += piece.thought
                    self.thought_tokens += piece.token_ids
                    self.thought_logprobs += piece.logprobs
                self.reason = piece.finish_reason
            else:
                assert isinstance(piece, TensorRows) and not self.rows_ended, "rows after their end"
                assert len(piece.rows) or piece.last
                self.rows += piece.rows[:, 0].astype(int).tolist() if len(piece.rows) else []
                self.rows_ended = piece.last


def fed(answer: AnswerAssembler, tokens: Sequence[int]) -> HeardAnswer:
    """The outputs after tokens, each of which has its row at once."""
    for place, token in enumerate(tokens):
        answer.token(token)
        answer.rows(row(place))
    heard = HeardAnswer()
    heard.take(answer)
    return heard


def test_a_row_waits_until_a_stop_string_can_no_longer_come() -> None:
    answer = answer_of(BOTH, [" green blue"])
    heard = fed(answer, [0, 1])
    assert (heard.text, heard.tokens, heard.rows) == (" red", [0, 1], [0]), "the second may still be the beginning of the stop string"
    answer.token(0)
    answer.rows(row(2))
    heard.take(answer)
    assert (heard.text, heard.rows) == (" red green red", [0, 1, 2])


def test_what_a_stop_string_cuts_off_has_no_rows() -> None:
    heard = fed(answer := answer_of(BOTH, [" blue"]), [0, 1, 2, 3])
    assert answer.ended and answer.complete
    assert (heard.text, heard.tokens, heard.reason) == (" red green", [0, 1, 2], FinishReason.STOP)
    assert (heard.rows, heard.rows_ended) == ([0, 1], True)


def test_a_token_that_is_cut_in_the_middle_is_said() -> None:
    """The `b` of `bc` is read, so it is heard too."""
    heard = fed(answer_of(BOTH, ["c."]), [5, 6, 3])
    assert (heard.text, heard.rows, heard.rows_ended) == (" ab", [0, 1], True)


def test_rows_may_come_later_than_their_tokens() -> None:
    answer, heard = answer_of(BOTH), HeardAnswer()
    answer.token(0)
    heard.take(answer)
    assert heard.rows == []
    answer.token(1)
    answer.rows(row(0))
    answer.end(FinishReason.LENGTH)
    heard.take(answer)
    assert (heard.reason, heard.rows, heard.rows_ended, answer.complete) == (FinishReason.LENGTH, [0], False, False)
    answer.rows(row(1))
    assert answer.complete
    heard.take(answer)
    assert (heard.rows, heard.rows_ended) == ([0, 1], True)


@pytest.mark.parametrize(
    ("end", "rows"), [("no room", [0, 1]), ("a stop string", [0, 1]), ("an end", [0, 1, 2]), ("a constraint", [0, 1, 2])]
)
def test_the_token_that_was_drawn_last_has_no_row_where_that_is_not_wanted(end: str, rows: list[int]) -> None:
    """Unless an end was drawn after it; and the row port ends all the same, here and where the answer is gone on with."""
    most, stop = 3 if end == "no room" else 9, ("c",) if end == "a stop string" else ()
    tokens = [0, 1, PIECES.index(b"bc")]  # A stop string cuts the last one in the middle.
    answer, heard = answer_of(BOTH, stop, max_tokens=most, last_row=False), HeardAnswer()
    for place, token in enumerate(tokens):
        answer.token(token, complete=end == "a constraint" and place == 2)
        heard.take(answer)
        if place < 2:
            answer.rows(row(place))
            assert len(heard.rows) <= place
    if end == "an end":
        answer.end(FinishReason.STOP)
    assert answer.ended and answer.complete == (len(rows) == 2)
    answer.rows(row(2))  # An engine may be ahead.
    assert answer.complete
    heard.take(answer)
    assert (heard.rows, heard.rows_ended) == (rows, True)
    again, rest = answer_of({"rows": 1}, stop, max_tokens=most, last_row=False, history=tokens, finished=heard.reason), HeardAnswer()
    again.rows(row(1))
    again.rows(row(2))
    assert again.complete
    rest.take(again)
    assert (rest.rows, rest.rows_ended) == (rows[1:], True)


def test_an_answer_without_text_ends_both_ports() -> None:
    answer, heard = answer_of(BOTH), HeardAnswer()
    answer.end(FinishReason.STOP)
    heard.take(answer)
    assert (heard.reason, heard.rows_ended, answer.complete) == (FinishReason.STOP, True, True)


def test_rows_that_nobody_wants_are_not_kept() -> None:
    answer, heard = answer_of({"text": 0}), HeardAnswer()
    answer.token(0)
    answer.rows(row(0))
    answer.end(FinishReason.STOP)
    heard.take(answer)
    assert (heard.text, heard.rows, heard.rows_ended, answer.complete) == (" red", [], False, True)


def test_rows_of_the_prompt_alone_need_no_token() -> None:
    answer, heard = answer_of({"prompt": 1}, max_tokens=9, prompt_port="prompt", prompt_rows=3), HeardAnswer()
    assert (answer.items, answer.first_slot, answer.complete) == (1, 1, False)
    answer.rows_at(0, np.concatenate([row(0), row(1), row(2)]))
    assert answer.complete and not answer.ended
    heard.take(answer)
    assert (heard.rows, heard.rows_ended) == ([1, 2], True)


@pytest.mark.parametrize(
    ("wanted", "options", "items"),
    [
        ({"text": 0}, {}, 9),
        ({"text": 0, "rows": 0}, {}, 10),
        ({"rows": 0}, {}, 10),
        ({"text": 2, "rows": 1}, {"history": (0, 1)}, 10),
        ({"rows": 1}, {"history": (0, 1), "finished": FinishReason.STOP}, 3),
        ({"text": 0, "rows": 0}, {"last_row": False}, 9),
        ({"rows": 1}, {"history": (0, 1), "finished": FinishReason.LENGTH, "last_row": False}, 3),
    ],
)
def test_no_more_items_are_asked_of_an_engine_than_are_needed(wanted: dict[str, int], options: dict[str, Any], items: int) -> None:
    assert answer_of(wanted, **{"max_tokens": 9, **options}).items == items


def test_rows_beyond_what_anybody_has_are_refused() -> None:
    with pytest.raises(BadRequest, match=r"^resume\.positions: "):
        answer_of({"text": 2, "rows": 3}, history=(0, 1))


TOKENS = st.lists(st.integers(0, len(PIECES) - 1), max_size=24)
STOPS = st.lists(st.sampled_from([" green blue", ".", "\n a", "bc", "c red", "é", "�"]), max_size=3)


def run(answer: AnswerAssembler, tokens: Sequence[int], places: Sequence[int], rng: random.Random, heard: HeardAnswer) -> None:
    """All tokens, and the rows of `places`, each some steps late, taken at random moments."""
    waiting = list(places)
    for token in tokens:
        if answer.ended:
            break
        answer.token(token)
        if rng.random() < 0.6 and waiting:
            answer.rows(row(waiting.pop(0)))
        if rng.random() < 0.6:
            heard.take(answer)
    answer.end(FinishReason.LENGTH)
    heard.take(answer)
    while not answer.complete:
        answer.rows(row(waiting.pop(0)))
        if rng.random() < 0.5:
            heard.take(answer)
    heard.take(answer)


@given(TOKENS, STOPS, st.integers(0, 1 << 32))
def test_rows_are_those_of_the_text_that_is_out_at_any_time(tokens: list[int], stop: list[str], seed: int) -> None:
    rng, heard, answer = random.Random(seed), HeardAnswer(), answer_of(BOTH, stop)
    run(answer, tokens, range(len(tokens)), rng, heard)
    assert heard.rows == list(range(len(heard.rows))) and heard.rows_ended
    said = b"".join(PIECES[token] for token in tokens[: len(heard.rows)]).decode(errors="replace")
    if heard.reason is FinishReason.STOP:
        assert any(text in b"".join(PIECES[token] for token in heard.tokens).decode(errors="replace") for text in stop)
        before = b"".join(PIECES[token] for token in tokens[: max(len(heard.rows) - 1, 0)]).decode(errors="replace")
        assert len(before) <= len(heard.text) + 1, "the last row is the first whose text reaches the cut"
    else:
        assert said == heard.text and len(heard.rows) == len(tokens)


@given(TOKENS, STOPS, st.integers(0, 1 << 32), st.data())
def test_an_answer_goes_on_with_the_rows_that_it_would_have_had(tokens: list[int], stop: list[str], seed: int, data: st.DataObject) -> None:
    rng, whole = random.Random(seed), HeardAnswer()
    run(answer_of(BOTH, stop), tokens, range(len(tokens)), rng, whole)
    known = data.draw(st.integers(0, max(len(whole.tokens) - 1, 0)))
    first = data.draw(st.integers(0, min(known, len(whole.rows))))
    before = Detokenizer(PIECES.__getitem__, stop)
    text = "".join(before.push(token) for token in tokens[:known])
    rest = HeardAnswer()
    again = answer_of({"text": known, "rows": first}, stop, history=tokens[:known])
    run(again, tokens[known:], range(first, len(tokens)), rng, rest)
    assert (text + rest.text, rest.reason) == (whole.text, whole.reason)
    assert (rest.tokens, rest.rows) == (whole.tokens[known:], whole.rows[first:])
    ended = HeardAnswer()
    run(answer_of({"rows": first}, stop, history=whole.tokens, finished=whole.reason), [], range(first, len(tokens)), rng, ended)
    assert (ended.rows, ended.reason, ended.rows_ended) == (whole.rows[first:], None, True)


# Thoughts -------------------------------------------------------------------------------------------------------------------------------

THINKING = [b"<think>", b"</think>", b"\n", b"\n\n", b" red", b" green", "é".encode()[:1], "é".encode()[1:], b"a", b"b\n"]
OPENS, CLOSES, LINE, LINES, RED, GREEN, HALF, OTHER_HALF, A, B = range(len(THINKING))
OPENED, FREE = Marks(OPENS, CLOSES, is_open=True), Marks(OPENS, CLOSES, is_open=False)


def assembler(marks: Marks, *, stop: tuple[str, ...] = (), rows: bool = False, **options: Any) -> AnswerAssembler:
    thought, wanted = Thought(marks, THINKING.__getitem__), BOTH if rows else {"text": 0}
    return AnswerAssembler(Detokenizer(THINKING.__getitem__, stop), wanted, row_port="rows", thought=thought, **options)


def heard_of(marks: Marks, tokens: list[int], *, every: int = 1, reason: FinishReason = FinishReason.STOP, **options: Any) -> HeardAnswer:
    """The outputs of an answer that is taken after each `every`-th token."""
    answer, heard = assembler(marks, **options), HeardAnswer()
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
    heard = heard_of(OPENED, THINKS, every=every, rows=True)
    assert (heard.thought, heard.text, heard.reason, heard.rows) == (" red\né", " greena", FinishReason.STOP, [8, 9])
    assert (heard.thought_tokens, heard.tokens) == (THINKS[:8], THINKS[8:])
    assert (heard.thought_logprobs, heard.logprobs) == ([-float(place) for place in range(8)], [-8.0, -9.0])


STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
OTHERS: dict[str, tuple[Marks, list[int], dict[str, Any], tuple[str, str, FinishReason, list[int]]]] = {
    "the model begins it": (FREE, [OPENS, *THINKS], {}, (" red\né", " greena", STOP, [9, 10])),
    "the model begins it again": (OPENED, [OPENS, *THINKS], {}, (" red\né", " greena", STOP, [9, 10])),
    "no thought": (FREE, [LINE, RED, OPENS, CLOSES, A], {}, ("", "\n red<think></think>a", STOP, [0, 1, 2, 3, 4])),
    "an empty thought": (OPENED, [LINES, CLOSES, LINES, A, CLOSES], {}, ("", "a</think>", STOP, [3, 4])),
    "a thought that is cut": (OPENED, [RED, LINE, HALF], {"reason": LENGTH}, (" red\n�", "", LENGTH, [])),
    "stop strings in the thought": (OPENED, [RED, CLOSES, LINE, A, RED, A], {"stop": (" red", "\n")}, (" red", "a", STOP, [3])),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_thoughts_are_told_apart_too(case: str) -> None:
    marks, tokens, options, expected = OTHERS[case]
    heard = heard_of(marks, tokens, rows=True, **options)
    assert (heard.thought, heard.text, heard.reason, heard.rows) == expected


def test_a_thought_may_be_as_long_as_the_answer_may() -> None:
    answer, heard = assembler(OPENED, max_tokens=2), HeardAnswer()
    for token in (RED, GREEN):
        answer.token(token)
    heard.take(answer)
    assert (answer.ended, heard.thought, heard.text, heard.reason) == (True, " red green", "", FinishReason.LENGTH)


def test_a_stop_string_is_not_looked_for_in_a_thought() -> None:
    heard = heard_of(OPENED, [RED, CLOSES, LINE, A, RED, A], stop=(" red", "\n"), rows=True)
    assert (heard.thought, heard.text, heard.reason) == (" red", "a", FinishReason.STOP)
    assert heard.rows == [3]


def test_line_ends_behind_a_thought_are_kept_where_the_answer_is_kept_to_something() -> None:
    thought = Thought(OPENED, THINKING.__getitem__, is_laid_out=False)
    assert [thought.take(token) for token in (RED, CLOSES, LINE)] == [" red", "", None]


@pytest.mark.parametrize("marks", [OPENED, FREE], ids=["begun by the prompt", "begun by the model"])
@pytest.mark.parametrize("is_made", [True, False], ids=["rows of ids", "rows that come"])
def test_an_answer_goes_on_anywhere_as_if_it_had_not_stopped(marks: Marks, is_made: bool, seed: int) -> None:
    rng = random.Random(seed)
    tokens = [*([] if marks.is_open else [OPENS]), *THINKS, *rng.choices(range(len(THINKING)), k=8)]
    row_of = row if is_made else None
    whole = heard_of(marks, tokens, rows=True, row_of=row_of)
    for cut in range(len(tokens)):
        begin = heard_of(marks, tokens[:cut])
        answer, rest = assembler(marks, rows=True, history=tokens[:cut], row_of=row_of), HeardAnswer()
        for place, token in enumerate(tokens):
            if place >= cut:
                answer.token(token)
            answer.rows_at(place, row(place))
        answer.end(FinishReason.STOP)
        rest.take(answer)
        assert rest.rows == whole.rows and rest.text == whole.text[len(answer_text(marks, tokens[:cut])) :]
        assert [*begin.thought_tokens, *rest.thought_tokens] == whole.thought_tokens
        assert [*begin.tokens, *rest.tokens] == whole.tokens


def answer_text(marks: Marks, tokens: list[int]) -> str:
    """The part of the text that is out after these tokens."""
    answer, heard = assembler(marks), HeardAnswer()
    for token in tokens:
        answer.token(token)
    heard.take(answer)
    return heard.text


def test_rows_are_wanted_from_tokens_of_the_answer_alone() -> None:
    thought = Thought(OPENED, THINKING.__getitem__)
    with pytest.raises(BadRequest):
        AnswerAssembler(Detokenizer(THINKING.__getitem__), {"rows": 2}, history=THINKS[:9], row_port="rows", thought=thought)
