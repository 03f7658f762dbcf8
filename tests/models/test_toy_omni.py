"""The toy that sees and hears says its formula: from pixels, places on three axes, prompt rows, and frames that need one another."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

import numpy as np
import pytest
from numpy.typing import NDArray

from helpers.families import ITEMS, PICTURE, SEEN, SOUND, TOKENS
from helpers.models import said
from helpers.waiting import turning
from omnistage.models.conversation import Media, Turn
from omnistage.models.interface import FinishReason, Piece, SpeechRequest, TensorRows, TextPiece, TextRequest, no_inputs
from omnistage.models.toy import formulas
from omnistage.models.toy.files import png, wav
from omnistage.models.toy.omni import OmniOptions, OmniTalker, OmniThinker, OmniThinkerOptions

LOOK = TextRequest(
    (
        Turn(
            "user",
            (
                "What is ",
                Media("image/png", png(PICTURE)),
                " and ",
                Media("audio/wav", wav(SOUND, formulas.SAMPLE_RATE_HZ)),
                "?",
            ),
        ),
    ),
    seed=5,
)
ALL = {"text": 0, "prompt": 0, "places": 0, "hidden": 0}


def test_places_are_worked_out_by_hand() -> None:
    """Two characters, a picture of 3 by 2 patches, one character: the picture takes as many places as its longer side has patches."""
    pixels = np.array([[1, 2, 3, 4], [5, 6, 7, 8], [1, 1, 1, 1], [1, 1, 1, 1], [9, 0, 0, 2]], np.uint8)
    assert formulas.items(["ab", pixels, "c"]).tolist() == [
        [97, 0, 0, 0],
        [98, 1, 1, 1],
        [14, 2, 2, 2],
        [22, 2, 2, 3],
        [4, 2, 3, 2],
        [4, 2, 3, 3],
        [9, 2, 4, 2],
        [2, 2, 4, 3],
        [99, 5, 5, 5],
    ]
    assert formulas.next_place(formulas.items(["ab", pixels])) == 5


async def test_others_run_while_it_reads_a_long_text() -> None:
    model = OmniThinker(OmniThinkerOptions())
    prepared = await model.prepare(TextRequest((Turn("user", ("a" * (1 << 20),)),), seed=1))
    async with turning() as turns, aclosing(model.generate(prepared, no_inputs(), ALL)) as pieces:
        await anext(pieces)
        assert turns() > 2


async def test_it_says_the_formula_of_what_it_sees_and_hears() -> None:
    rows: dict[str, list[NDArray[np.generic]]] = {"prompt": [], "places": [], "hidden": []}
    text, order = "", []
    async for piece in said(OmniThinker(OmniThinkerOptions()), LOOK, ALL):
        if isinstance(piece, TextPiece):
            text += piece.text
            order.append("text")
        else:
            rows[piece.port].append(piece.rows)
            order.append(piece.port)
    assert text == "".join(map(formulas.word, TOKENS))
    assert TOKENS[1] == (31 * 5 + int((ITEMS @ [1, 1, 2, 3]).sum()) + 7 * (formulas.next_place(ITEMS) + 1)) % 1000
    np.testing.assert_array_equal(np.concatenate(rows["prompt"]), formulas.prompt_rows(formulas.items(SEEN)))
    np.testing.assert_array_equal(np.concatenate(rows["places"]), ITEMS)
    np.testing.assert_array_equal(np.concatenate(rows["hidden"]), formulas.omni_rows(TOKENS))
    assert np.concatenate(rows["prompt"]).dtype == np.uint16 and np.concatenate(rows["places"]).dtype == np.int64
    assert max(order.index("prompt"), order.index("places")) < min(order.index("text"), order.index("hidden")), "prompt rows come first"


async def test_rows_of_the_prompt_alone_take_no_token() -> None:
    """A token would take an hour."""
    pieces = [piece async for piece in said(OmniThinker(OmniThinkerOptions(interval_s=3600)), LOOK, {"prompt": 0, "places": 0})]
    assert {piece.port for piece in pieces if isinstance(piece, TensorRows) and piece.last} == {"prompt", "places"}


async def test_a_pixel_and_its_place_count() -> None:
    other = PICTURE.copy()
    other[20, 33] ^= 1
    for changed in (other, PICTURE.T.copy()):
        again = TextRequest((Turn("user", ("What is ", Media("image/png", png(changed)))),), seed=5)
        same = TextRequest((Turn("user", ("What is ", Media("image/png", png(PICTURE)))),), seed=5)
        assert await tokens(again) != await tokens(same)


async def tokens(request: TextRequest) -> list[int]:
    pieces = said(OmniThinker(OmniThinkerOptions()), request, {"text": 0})
    return [token async for piece in pieces if isinstance(piece, TextPiece) for token in piece.token_ids]


async def test_the_row_of_a_token_comes_a_step_after_the_token() -> None:
    given = said(OmniThinker(OmniThinkerOptions(max_chunk=1)), LOOK, {"text": 0, "hidden": 0})
    first, second, third = [await anext(given) for _ in range(3)]
    await given.aclose()
    assert isinstance(first, TextPiece) and isinstance(second, TextPiece) and isinstance(third, TensorRows) and len(third.rows) == 1


# The Talker ------------------------------------------------------------------------------------------------------------------------------

PROMPT = [Piece("prompt", 0, True, formulas.prompt_rows(ITEMS)), Piece("places", 0, True, ITEMS)]


def row(n: int, *, last: bool = False) -> Piece:
    return Piece("hidden", n, last, formulas.omni_rows(TOKENS[n : n + 1]))


class Feeding:
    """Inputs that are given one by one, and frames that are read as they come."""

    def __init__(self, talker: OmniTalker, request: SpeechRequest, first: int = 0) -> None:
        self._queue: asyncio.Queue[Piece] = asyncio.Queue()
        self.frames: list[list[int]] = []
        self.reason: FinishReason | None = None
        self.task = asyncio.create_task(self._listen(talker, request, first))

    async def _inputs(self) -> AsyncIterator[Piece]:
        while True:
            yield await self._queue.get()

    async def _listen(self, talker: OmniTalker, request: SpeechRequest, first: int) -> None:
        async for frames in talker.speak(await talker.prepare(request), self._inputs(), {"codes": first}):
            self.frames += frames.rows.tolist()
            self.reason = frames.finish_reason

    async def give(self, *pieces: Piece) -> int:
        """Frames that there are when nothing more can come of it."""
        for piece in pieces:
            self._queue.put_nowait(piece)
        for _ in range(50):
            await asyncio.sleep(0)
        return len(self.frames)


async def test_it_starves_without_the_next_row_and_wakes_with_it() -> None:
    talker = OmniTalker(OmniOptions())
    speech = Feeding(talker, SpeechRequest(seed=1))
    assert await speech.give(row(0), row(1)) == 0, "the prompt is not there"
    assert await speech.give(PROMPT[0]) == 0
    assert await speech.give(PROMPT[1]) == 2
    for n in range(2, len(TOKENS)):
        assert await speech.give(row(n, last=n == len(TOKENS) - 1)) == n + 1 + formulas.TAIL * (n == len(TOKENS) - 1)
    await speech.task
    assert speech.frames == formulas.omni_frames(ITEMS, TOKENS).tolist()
    assert speech.reason is FinishReason.STOP


async def test_a_frame_needs_the_frame_before_it(seed: int) -> None:
    """Rows in another order make other frames from there on to the end."""
    whole = formulas.omni_frames(ITEMS, TOKENS)
    swapped = formulas.omni_frames(ITEMS, [*TOKENS[:3], TOKENS[4], TOKENS[3], *TOKENS[5:]])
    assert (whole[:3] == swapped[:3]).all() and (whole[3:] != swapped[3:]).any(axis=1).all()
    rng, talker = random.Random(seed), OmniTalker(OmniOptions())
    for known in (0, 1, 5, len(whole) - 1, rng.randrange(len(whole))):
        request = SpeechRequest(seed=1, history=whole[:known])
        assert await spoken(talker, request, known) == whole[known:].tolist()


async def spoken(talker: OmniTalker, request: SpeechRequest, first: int) -> list[list[int]]:
    speech = Feeding(talker, request, first)
    await speech.give(*PROMPT, *(row(n, last=n == len(TOKENS) - 1) for n in range(len(TOKENS))))
    await speech.task
    return speech.frames


@pytest.mark.parametrize("voice", ["toy", "other"])
async def test_voices_differ_and_a_limit_holds(voice: str) -> None:
    whole: Sequence[Sequence[int]] = formulas.omni_frames(ITEMS, TOKENS, ("toy", "other").index(voice)).tolist()
    assert await spoken(OmniTalker(OmniOptions()), SpeechRequest(seed=1, voice=voice, max_frames=9), 0) == whole[:9]
