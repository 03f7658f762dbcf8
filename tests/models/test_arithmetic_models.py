"""Models on the real engine, behind the interface: every token, row and frame is done again by hand, and rows in bfloat16 are the bits that
the decoder gave."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from helpers import arithmetic
from helpers.arithmetic import IDS
from helpers.arithmetic_models import TAIL, ArithmeticTalker, ArithmeticThinker, TinyThinker, frames_by_hand
from helpers.engine_family import StarvingTalker
from helpers.engines import items, read
from helpers.families import PICTURE, PROMPT, SMALL_ROWS, until_a_seven
from helpers.logic import pieces_of, run_logic
from helpers.models import said
from helpers.run import params
from helpers.waiting import until
from omnistage.engine.memory import PAGE_ROWS
from omnistage.models.conversation import Media, Turn
from omnistage.models.interface import BadRequest, FinishReason, Piece, Sampling, SpeechRequest, TensorRows, TextPiece, TextRequest
from omnistage.models.text.engine_model import array_of
from omnistage.models.toy.files import png
from omnistage.talker.stage import TalkerStage
from omnistage.thinker.stage import parse

COUNT = 40
LOOK = TextRequest((Turn("user", ("What is ", Media("image/png", png(PICTURE)), "?")),), seed=9, max_tokens=COUNT)


@pytest.fixture
async def thinker() -> AsyncIterator[ArithmeticThinker]:
    model = ArithmeticThinker()
    yield model
    assert model.load().kv_pages_used == 0
    await model.close()


async def test_text_prompt_rows_and_reply_rows_are_those_of_the_engine(thinker: ArithmeticThinker) -> None:
    """The row of the last token too, which the engine computes only where one more is asked for."""
    prepared = await thinker.prepare(LOOK)
    items, taps = arithmetic.answer(prepared.asked.prompt, LOOK.seed, COUNT + 1)
    tokens, rows = list[int](), {"prompt": list[list[float]](), "hidden": list[list[float]]()}
    async for piece in said(thinker, LOOK, {"text": 0, "prompt": 0, "hidden": 0}):
        if isinstance(piece, TextPiece):
            tokens += piece.token_ids
        else:
            rows[piece.port] += piece.rows.tolist()
    assert tokens == [first * IDS + second for first, second in items[:COUNT]]
    expected = [list(map(float, tap)) for tap in taps]
    size = len(prepared.asked.prompt)
    assert rows == {"prompt": expected[:size], "hidden": expected[size : size + COUNT]}


async def test_rows_that_nobody_wants_are_not_asked_of_the_engine(thinker: ArithmeticThinker) -> None:
    pieces = [piece async for piece in said(thinker, LOOK, {"text": 0})]
    assert not any(isinstance(piece, TensorRows) for piece in pieces)
    assert isinstance(pieces[-1], TextPiece) and pieces[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("wanted", "rows", "history", "finished"),
    [({"prompt": 0}, 196, 0, None), ({"prompt": 120}, 76, 7, None), ({"hidden": 3}, 4, 7, FinishReason.STOP)],
    ids=["prompt", "prompt, resumed", "rows of an answer that has ended"],
)
async def test_an_answer_that_nobody_wants_is_not_made(
    thinker: ArithmeticThinker, wanted: dict[str, int], rows: int, history: int, finished: FinishReason | None
) -> None:
    request = replace(LOOK, history=tuple(range(history)), finished=finished)
    pieces = [piece async for piece in said(thinker, request, wanted)]
    assert all(isinstance(piece, TensorRows) for piece in pieces)
    assert sum(len(piece.rows) for piece in pieces if isinstance(piece, TensorRows)) == rows
    assert thinker.engine.stats().items <= 1


async def test_a_picture_that_was_seen_before_need_not_be_computed_again(thinker: ArithmeticThinker) -> None:
    async def cached(request: TextRequest) -> int:
        return sum([piece.cached_tokens async for piece in said(thinker, request) if isinstance(piece, TextPiece)])

    other = PICTURE.copy()
    other[0, 0] ^= 1
    again = TextRequest((Turn("user", ("What is ", Media("image/png", png(other)), "?")),), seed=9, max_tokens=COUNT)
    assert await cached(LOOK) == 0
    assert await cached(LOOK) > 100
    assert await cached(again) == 0, "another picture has other rows"


async def test_a_stop_string_cuts_the_rows_with_the_text(thinker: ArithmeticThinker) -> None:
    request = parse(until_a_seven().params.thinker, 5)
    text, tokens, rows = "", 0, 0
    async for piece in said(thinker, request, {"text": 0, "hidden": 0}):
        if isinstance(piece, TextPiece):
            text, tokens, last = text + piece.text, tokens + len(piece.token_ids), piece.finish_reason
        else:
            rows += len(piece.rows)
    assert last is FinishReason.STOP and not any(stop in text for stop in request.stop)
    assert text and rows == len(text.split()) and rows <= tokens
    assert PROMPT in str(request.turns[0].text)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"max_tokens": 3000}, "thinker.max_tokens"),
        ({"turns": (Turn("user", ("long " * 500,)),)}, "thinker.messages"),
        ({"history": (IDS * IDS,)}, "resume.history"),
        ({"sampling": Sampling(logit_bias={IDS: 1.0})}, "thinker.sampling.logit_bias"),
    ],
)
async def test_what_the_engine_could_never_run_is_refused_before(thinker: ArithmeticThinker, change: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest) as refused:
        await thinker.prepare(replace(LOOK, **change))
    assert refused.value.field == field


@pytest.mark.parametrize("make", [ArithmeticTalker, StarvingTalker])
@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"history": np.array([[1, 2], [3, IDS]], np.uint32)}, "resume.history"),
        ({"history": np.ones((3000, 2), np.uint32)}, "resume.history"),
        ({"sampling": Sampling(logit_bias={IDS: 1.0})}, "talker.sampling.logit_bias"),
    ],
)
async def test_speech_that_the_engine_could_never_make_is_refused_before(
    make: Callable[[], ArithmeticTalker | StarvingTalker], change: dict[str, Any], field: str
) -> None:
    talker = make()
    with pytest.raises(BadRequest) as refused:
        await talker.prepare(SpeechRequest(1, **change))
    assert refused.value.field == field
    await talker.close()


async def test_a_talker_finds_the_rows_of_its_own_scope_only(seed: int) -> None:
    talker = StarvingTalker()
    logic, rng, prompt = TalkerStage(talker), random.Random(seed), np.arange(200, dtype=np.float32).reshape(100, 2) % 20
    inputs = [*pieces_of("prompt", prompt, rng), *pieces_of("hidden", np.empty((0, 2), np.float32), rng)]

    async def computed(scope: str) -> int:
        before = talker.engine.stats().rows
        await run_logic(logic, params("talker", max_frames=1), inputs, scope=scope)
        return talker.engine.stats().rows - before

    whole = 1 + len(prompt)
    assert [await computed(scope) for scope in ("one", "one", "other", "")] == [whole, whole % PAGE_ROWS, whole, whole]
    await logic.close()


async def test_speech_starves_until_its_next_row_comes() -> None:
    talker = ArithmeticTalker()
    queue: asyncio.Queue[Piece] = asyncio.Queue()

    async def inputs() -> AsyncIterator[Piece]:
        while True:
            yield await queue.get()

    frames: list[list[int]] = []
    speech = talker.speak(await talker.prepare(SpeechRequest(seed=4)), inputs(), {"codes": 0})
    frames += (await anext(speech)).rows.tolist()
    for n in range(len(SMALL_ROWS)):
        await until(lambda: talker.engine.stats().starved == 1)
        assert len(frames) == n + 1
        queue.put_nowait(Piece("hidden", n, n == len(SMALL_ROWS) - 1, SMALL_ROWS[n : n + 1]))
        frames += (await anext(speech)).rows.tolist()
    async for more in speech:
        frames += more.rows.tolist()
        reason = more.finish_reason
    assert frames == [list(frame) for frame in frames_by_hand(SMALL_ROWS, 4)]
    assert (len(frames), reason) == (len(SMALL_ROWS) + TAIL, FinishReason.STOP)
    assert talker.load().kv_pages_used == 0
    await talker.close()


# Rows in bfloat16 --------------------------------------------------------------------------------------------------------------------


def test_bfloat16_travels_as_its_bits() -> None:
    rows = torch.randn(5, 8).bfloat16()
    for tensor in (rows, rows[1:3], rows[:, ::2], rows[:0]):
        array = array_of(tensor)
        assert array.dtype == np.uint16 and array.shape == tuple(tensor.shape)
        assert torch.equal(torch.from_numpy(array.copy()).view(torch.bfloat16), tensor)


def test_other_types_are_what_they_are() -> None:
    rows = torch.randn(3, 4)
    assert array_of(rows).dtype == np.float32
    assert array_of(rows).ctypes.data == rows.data_ptr()


LONG = TextRequest((Turn("user", ("What is a bfloat16, and why are its rows half as long?",)),), seed=3, max_tokens=12)


async def test_rows_of_prompt_and_reply_are_the_bits_of_the_taps() -> None:
    model = TinyThinker()
    tokens, rows = list[int](), {"prompt": list[np.ndarray](), "hidden": list[np.ndarray]()}
    async for piece in said(model, LONG, {"text": 0, "prompt": 0, "hidden": 0}):
        if isinstance(piece, TextPiece):
            tokens += piece.token_ids
        elif isinstance(piece, TensorRows) and len(piece.rows):
            assert piece.rows.dtype == np.uint16
            rows[piece.port].append(np.array(piece.rows))
    asked = model.asked(LONG)
    await model.close()
    other = TinyThinker()
    events = await read(other.engine.submit(type(asked)(asked.prompt, asked.seed, asked.max_items, taps_from=0)))
    await other.close()
    taps = torch.cat([event.taps.rows for event in events if event.taps is not None])
    assert taps.dtype == torch.bfloat16 and tokens == [item[0] for item in items(events)][: len(tokens)]
    given = np.concatenate([*rows["prompt"], *rows["hidden"]])
    assert len(given) == len(asked.prompt) + len(tokens)
    assert torch.equal(torch.from_numpy(given).view(torch.bfloat16), taps[: len(given)])
