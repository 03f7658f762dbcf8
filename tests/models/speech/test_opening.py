"""The beginning of a speech takes no more time and memory than its rows need, however they come."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from omnistage.engine.memory import PAGE_ROWS
from omnistage.models.interface import BadRequest, Piece
from omnistage.models.speech.talker import AXES, Opening

WIDTH, CONTEXT = 8, 40_000


@pytest.fixture
def opening() -> Opening:
    return Opening(AXES, torch.zeros(1, WIDTH), CONTEXT)


def piece(port: str, rows: int, *, last: bool = False) -> Piece:
    size, dtype = (3, np.int32) if port == "places" else (WIDTH, np.float32)
    return Piece(port, 0, last, np.zeros((rows, size), dtype))


@pytest.mark.timeout(30)
@pytest.mark.parametrize("order", [("places", "prompt"), ("prompt", "places")])
def test_rows_that_come_one_by_one_are_counted_once(opening: Opening, order: tuple[str, str]) -> None:
    """Summed up for each, these would take minutes, and everybody's event loop."""
    count, pages = 20_000, 0
    for port in order:
        for number in range(count):
            opening.take(piece(port, 1, last=number == count - 1))
            if opening.readable:
                pages += len(opening.read())
    assert pages == count // PAGE_ROWS
    opening.take(piece("hidden", 1))
    assert opening.complete and sum(len(rows) for rows, _ in opening.read()) == count % PAGE_ROWS + 2


def test_of_an_answer_no_more_is_kept_than_can_be_spoken(opening: Opening) -> None:
    """Until the places of a conversation ended, which they may never do."""
    for _ in range(100):
        opening.take(piece("hidden", 999))
    assert sum(map(len, opening.reply)) == CONTEXT and len(opening.reply) == CONTEXT // 999 + 1
    opening.take(piece("hidden", 1, last=True))
    opening.take(piece("prompt", 1, last=True))
    opening.take(piece("places", 1, last=True))
    assert opening.complete and opening.ended and sum(map(len, opening.reply)) == CONTEXT


@pytest.mark.parametrize("port", ["prompt", "places"])
def test_of_a_conversation_no_more_is_taken_than_fits(opening: Opening, port: str) -> None:
    opening.take(piece(port, CONTEXT - 2))
    with pytest.raises(BadRequest, match="the Talker takes 39998 rows") as refused:
        opening.take(piece(port, 1))
    assert refused.value.field == "thinker.messages"
