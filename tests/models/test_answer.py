"""The text of an answer and its rows: a row goes out when the text of its token is final, and what a stop string cut off has none."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnistage.engine.detokenizer import Detokenizer
from omnistage.models.interface import BadRequest, FinishReason, TensorRows, TextPiece
from omnistage.models.text.answer import AnswerAssembler

WORDS = [" red", " green", " blue", ".", "\n", " a", "bc", "", "\U0001f600", "é"]
PIECES = [*(word.encode() for word in WORDS), *(bytes([byte]) for byte in "é\U0001f600".encode())]
"""Words, and single bytes of characters of several."""

BOTH = {"text": 0, "rows": 0}


def answer_of(wanted: dict[str, int], stop: Sequence[str] = (), **given_: object) -> AnswerAssembler:
    return AnswerAssembler(Detokenizer(PIECES.__getitem__, stop), wanted, row_port="rows", **given_)  # type: ignore[arg-type]


def row(place: int) -> np.ndarray:
    """The row of the token at a place says the place."""
    return np.full((1, 2), place, np.float32)


class PiecesOfAnswer:
    """The outputs of an answer."""

    def __init__(self) -> None:
        self.text, self.tokens, self.rows = "", list[int](), list[int]()
        self.reason: FinishReason | None = None
        self.rows_ended = False

    def take(self, answer: AnswerAssembler) -> None:
        for piece in answer.take():
            if isinstance(piece, TextPiece):
                assert self.reason is None, "text after its end"
                self.text += piece.text
                self.tokens += piece.token_ids
                self.reason = piece.finish_reason
            else:
                assert isinstance(piece, TensorRows) and not self.rows_ended, "rows after their end"
                assert len(piece.rows) or piece.last
                self.rows += piece.rows[:, 0].astype(int).tolist() if len(piece.rows) else []
                self.rows_ended = piece.last


def test_a_row_waits_until_a_stop_string_can_no_longer_come() -> None:
    answer, heard = answer_of(BOTH, [" green blue"]), PiecesOfAnswer()
    for place, token in enumerate([0, 1]):
        answer.token(token)
        answer.rows(row(place))
    heard.take(answer)
    assert (heard.text, heard.tokens, heard.rows) == (" red", [0, 1], [0]), "the second may still be the beginning of the stop string"
    answer.token(0)
    answer.rows(row(2))
    heard.take(answer)
    assert (heard.text, heard.rows) == (" red green red", [0, 1, 2])


def test_what_a_stop_string_cuts_off_has_no_rows() -> None:
    answer, heard = answer_of(BOTH, [" blue"]), PiecesOfAnswer()
    for place, token in enumerate([0, 1, 2, 3]):
        answer.token(token)
        answer.rows(row(place))
    assert answer.ended and answer.complete
    heard.take(answer)
    assert (heard.text, heard.tokens, heard.reason) == (" red green", [0, 1, 2], FinishReason.STOP)
    assert (heard.rows, heard.rows_ended) == ([0, 1], True)


def test_a_token_that_is_cut_in_the_middle_is_said() -> None:
    """The `b` of `bc` is read, so it is heard too."""
    answer, heard = answer_of(BOTH, ["c."]), PiecesOfAnswer()
    for place, token in enumerate([5, 6, 3]):
        answer.token(token)
        answer.rows(row(place))
    heard.take(answer)
    assert (heard.text, heard.rows, heard.rows_ended) == (" ab", [0, 1], True)


def test_rows_may_come_later_than_their_tokens() -> None:
    answer, heard = answer_of(BOTH), PiecesOfAnswer()
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
    answer, heard = answer_of(BOTH, stop, max_tokens=most, last_row=False), PiecesOfAnswer()
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
    again, rest = answer_of({"rows": 1}, stop, max_tokens=most, last_row=False, history=tokens, finished=heard.reason), PiecesOfAnswer()
    again.rows(row(1))
    again.rows(row(2))
    assert again.complete
    rest.take(again)
    assert (rest.rows, rest.rows_ended) == (rows[1:], True)


def test_an_answer_without_text_ends_both_ports() -> None:
    answer, heard = answer_of(BOTH), PiecesOfAnswer()
    answer.end(FinishReason.STOP)
    heard.take(answer)
    assert (heard.reason, heard.rows_ended, answer.complete) == (FinishReason.STOP, True, True)


def test_rows_that_nobody_wants_are_not_kept() -> None:
    answer, heard = answer_of({"text": 0}), PiecesOfAnswer()
    answer.token(0)
    answer.rows(row(0))
    answer.end(FinishReason.STOP)
    heard.take(answer)
    assert (heard.text, heard.rows, heard.rows_ended, answer.complete) == (" red", [], False, True)


def test_rows_of_the_prompt_alone_need_no_token() -> None:
    answer, heard = answer_of({"prompt": 1}, max_tokens=9, prompt_port="prompt", prompt_rows=3), PiecesOfAnswer()
    assert (answer.items, answer.first_slot, answer.complete) == (1, 1, False)
    answer.rows_at(0, np.concatenate([row(0), row(1), row(2)]))
    assert answer.complete and not answer.ended
    heard.take(answer)
    assert (heard.rows, heard.rows_ended) == ([1, 2], True)


@pytest.mark.parametrize(
    ("wanted", "given_", "items"),
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
def test_no_more_items_are_asked_of_an_engine_than_are_needed(wanted: dict[str, int], given_: dict[str, object], items: int) -> None:
    assert answer_of(wanted, **{"max_tokens": 9, **given_}).items == items  # type: ignore[arg-type]


def test_rows_beyond_what_anybody_has_are_refused() -> None:
    with pytest.raises(BadRequest) as refused:
        answer_of({"text": 2, "rows": 3}, history=(0, 1))
    assert refused.value.field == "resume.positions"


TOKENS = st.lists(st.integers(0, len(PIECES) - 1), max_size=24)
STOPS = st.lists(st.sampled_from([" green blue", ".", "\n a", "bc", "c red", "é", "�"]), max_size=3)


def run(answer: AnswerAssembler, tokens: Sequence[int], places: Sequence[int], rng: random.Random, heard: PiecesOfAnswer) -> None:
    """All tokens, and the rows of `places`, each some steps late, taken at random moments."""
    waiting = list(places)
    known = places[0] if places else 0
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
    assert known >= 0
    while not answer.complete:
        answer.rows(row(waiting.pop(0)))
        if rng.random() < 0.5:
            heard.take(answer)
    heard.take(answer)


@given(TOKENS, STOPS, st.integers(0, 1 << 32))
def test_rows_are_those_of_the_text_that_is_out_at_any_time(tokens: list[int], stop: list[str], seed: int) -> None:
    rng, heard, answer = random.Random(seed), PiecesOfAnswer(), answer_of(BOTH, stop)
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
    rng, whole = random.Random(seed), PiecesOfAnswer()
    run(answer_of(BOTH, stop), tokens, range(len(tokens)), rng, whole)
    known = data.draw(st.integers(0, max(len(whole.tokens) - 1, 0)))
    first = data.draw(st.integers(0, min(known, len(whole.rows))))
    before = Detokenizer(PIECES.__getitem__, stop)
    text = "".join(before.push(token) for token in tokens[:known])
    rest = PiecesOfAnswer()
    again = answer_of({"text": known, "rows": first}, stop, history=tokens[:known])
    run(again, tokens[known:], range(first, len(tokens)), rng, rest)
    assert text + rest.text == whole.text
    assert rest.tokens == whole.tokens[known:]
    assert rest.rows == whole.rows[first:]
    assert rest.reason == whole.reason
    ended = PiecesOfAnswer()
    run(answer_of({"rows": first}, stop, history=whole.tokens, finished=whole.reason), [], range(first, len(tokens)), rng, ended)
    assert (ended.rows, ended.reason, ended.rows_ended) == (whole.rows[first:], None, True)
