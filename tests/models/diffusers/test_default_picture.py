"""The default picture model draws what it is told: scenes that were never shown in its training, looked at by their pixels."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack

import numpy as np
import pytest

from helpers import lengths
from helpers.artists import draw, model_of, pixels_of
from omnistage.models.diffusers.family import model_directory
from omnistage.models.diffusers.model import DrawnModel
from omnistage.models.diffusers.pictures import BLANK
from omnistage.models.interface import Note
from tools.pictures.scenes import Scene
from tools.pictures.score import scenes, score_pictures

ENOUGH = 0.9
"""Part of the backgrounds, places and colours that are right at least."""
KINDS = 0.8
"""The same of the kinds of shapes."""
THINGS = ("1", "2")
"""The numbers of things in a scene."""


@pytest.fixture(scope="module")
def model() -> Iterator[DrawnModel[object]]:
    """Loaded once: its callers' event loops come and go."""
    with asyncio.Runner() as runner:
        opened = AsyncExitStack()
        yield runner.run(opened.enter_async_context(model_of(model_directory())))
        runner.run(opened.aclose())


async def drawn(model: DrawnModel[object], asked: list[tuple[Scene, str]]) -> list[np.ndarray]:
    """All at once, each with its own seed."""
    made = await asyncio.gather(*(draw(model, words, seed=seed) for seed, (_, words) in enumerate(asked)))
    return [pixels_of(one.pictures[0].data).astype(np.uint8) for one in made]


@lengths.one_or_all("things", THINGS)
async def test_a_picture_follows_its_prompt(model: DrawnModel[object], things: str, seed: int) -> None:
    asked = scenes(40, int(lengths.draw(things, THINGS, seed)), seed=11)
    pictures = await drawn(model, asked)
    right = score_pictures(lambda words, number: pictures[number], asked)
    print(right)
    assert min(right["background"], right["place"], right["colour"]) >= ENOUGH
    assert right["kind"] >= KINDS


@lengths.long_form(
    "models/diffusers/test_vocabulary.py::test_a_prompt_without_its_words_is_told", unkept="the default model draws whatever is written"
)
async def test_words_that_were_never_said_in_training_are_no_error(model: DrawnModel[object]) -> None:
    for words in ("a photo of a cat wearing a hat", "😀", "red " * 150, "房子"):
        drawing = await draw(model, words, steps=2)
        assert pixels_of(drawing.pictures[0].data).shape == (128, 128, 3)


@lengths.long_form(
    "models/diffusers/test_model.py::test_eight_in_words_and_guidance_of_their_own_draw_at_once_what_they_draw_alone",
    "models/diffusers/test_vocabulary.py::test_another_size_than_its_own_is_told",
    unkept="the default model draws in other sizes than its own",
)
@pytest.mark.parametrize(("width", "height"), [(64, 64), (192, 128), (256, 256)])
async def test_other_sizes_than_that_of_its_training_are_drawn_too(model: DrawnModel[object], width: int, height: int) -> None:
    drawing = await draw(model, "a red circle on a blue background", width=width, height=height, steps=4)
    assert pixels_of(drawing.pictures[0].data).shape == (height, width, 3)


@lengths.long_form(
    "models/diffusers/test_vocabulary.py::test_a_prompt_without_its_words_is_told", unkept="the default model draws the same of capitals"
)
async def test_capitals_are_no_other_words(model: DrawnModel[object]) -> None:
    small, capitals = [(await draw(model, words, seed=1)).pixels for words in ("a red circle on blue", "A Red CIRCLE On BLUE")]
    assert np.array_equal(small, capitals)


@pytest.mark.parametrize(
    ("words", "side", "blank"),
    [("a white heart", 128, True), pytest.param("a red circle", 512, True, marks=lengths.LONG), ("a red circle", 128, False)],
)
async def test_a_blank_picture_is_told(model: DrawnModel[object], words: str, side: int, blank: bool) -> None:
    """Whatever the words: white on white, or a size at which nothing is drawn."""
    drawing = await draw(model, words, seed=1, width=side, height=side)
    assert (BLANK in [piece.text for piece in drawing.pieces if isinstance(piece, Note)]) == blank
