"""The default picture model: its description of its few words, the answer to a prompt that has none of them, and scenes that were never
shown in its training, looked at by their pixels."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest

from helpers import lengths
from helpers.artists import draw, model_of, pixels_of
from helpers.command import omnistage
from omnistage.gateway.state import EXAMPLES
from omnistage.models.checkpoint.files import BadCheckpoint
from omnistage.models.diffusers.family import model_directory
from omnistage.models.diffusers.model import DrawnModel
from omnistage.models.diffusers.options import Vocabulary
from omnistage.models.diffusers.pictures import BLANK
from omnistage.models.interface import Note
from omnistage.router.pipeline import load_pipeline
from tools.pictures.pack import DEFAULTS
from tools.pictures.scenes import KINDS, Scene
from tools.pictures.score import scenes, score_pictures

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", ROOT / "Makefile", *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md"), ROOT / "sdk/omnistage/cli/main.py"]
DRAWS = "this model draws coloured shapes: circle, square, triangle, star, heart"
NONE = f"{DRAWS}; this prompt names none of them"
NO_COLOUR = f"{DRAWS}; this prompt names none of: red, orange, yellow, green, blue, purple, pink, black, white, violet"


@pytest.fixture(scope="module")
def shipped() -> Vocabulary:
    return Vocabulary.of(model_directory())


@pytest.mark.parametrize(
    ("prompt", "notes"),
    [
        ("a red circle", []),
        ("A RED CIRCLE", []),
        ("two blue boxes", []),
        ("three green triangles, please!", []),
        ("a red star in the rain", []),
        ("red-heart", []),
        ("a cat", [NONE]),
        ("a hill in the rain", [NONE]),
        ("a red thing", [NONE]),
        ("blue", [NONE]),
        ("a red starfish in a starry night", [NONE]),
        ("un círculo rojo", [NONE]),
        ("赤い円", [NONE]),
        ("😀", [NONE]),
        ("a circle in the rain", [NO_COLOUR]),
        ("a ball of wool", [NO_COLOUR]),
        ("a reddish circle", [NO_COLOUR]),
        ("a brown circle", [NO_COLOUR]),
        ("a turquoise star", [NO_COLOUR]),
    ],
)
def test_a_prompt_without_its_words_is_told(shipped: Vocabulary, prompt: str, notes: list[str]) -> None:
    assert list(shipped.notes(prompt)) == notes


def test_of_many_words_a_note_names_the_first() -> None:
    many = Vocabulary("letters", {"letter": ("a",), "mark": tuple(f"mark{chr(n)}" for n in range(97, 123))})
    (note,) = many.notes("a")
    assert note.endswith("markk, markl, ...")


def test_a_checkpoint_that_says_nothing_of_this_has_no_notes(tmp_path: Path) -> None:
    for said in (None, {"width": 64}):
        if said is not None:
            (tmp_path / "omnistage.json").write_text(json.dumps(said))
        vocabulary = Vocabulary.of(tmp_path)
        assert list(vocabulary.notes("a cat")) == []
        assert vocabulary.cased("A Cat") == "A Cat"


@pytest.mark.parametrize(
    "draws",
    [
        3,
        {},
        {"what": "shapes"},
        {"what": "", "words": {}},
        {"what": "x" * 200, "words": {}},
        {"what": "shapes", "words": {"shape": []}},
        {"what": "shapes", "words": {"shape": "circle"}},
        {"what": "shapes", "words": {"shape": [1]}},
        {"what": "shapes", "words": {"shape": ["circle"]}, "one_size": "yes"},
    ],
)
def test_words_in_another_form_are_refused_with_the_form(tmp_path: Path, draws: object) -> None:
    (tmp_path / "omnistage.json").write_text(json.dumps({"draws": draws}))
    with pytest.raises(BadCheckpoint, match="draws must be as in"):
        Vocabulary.of(tmp_path)


def test_what_is_typed_tells_what_can_be_drawn() -> None:
    """The help, the pipeline and the package say what the checkpoint says."""
    assert json.loads((model_directory() / "omnistage.json").read_text()) == DEFAULTS
    described = load_pipeline("picture").description
    helped = " ".join(omnistage("draw", "--help").stdout.split())
    for text in (described, helped):
        assert "coloured shapes" in text
        assert [kind for kind in KINDS if kind not in text] == []


def test_the_pages_have_the_default_model_draw_what_it_can(shipped: Vocabulary) -> None:
    """A user who copies a line without a pipeline or pictures of their own, or tries the example of the HTTP interface, gets no blank
    paper."""
    lines = [line for page in PAGES for line in page.read_text(encoding="utf-8").splitlines()]
    typed = [re.search(r'omnistage draw "([^"]+)"', line) for line in lines if not re.search("--pipeline|--image", line)]
    sent = [re.search(r'images/generations .*"prompt": "([^"]+)"', line) for line in lines]
    prompts = [found[1] for found in (*typed, *sent) if found] + [EXAMPLES["/v1/images/generations"]["prompt"]]
    assert len(prompts) > 6
    assert [prompt for prompt in prompts if list(shipped.notes(prompt))] == []


# Scenes that are drawn -------------------------------------------------------------------------------------------------------------------


ENOUGH = 0.9
"""Part of the backgrounds, places and colours that are right at least."""
ENOUGH_KINDS = 0.8
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
    assert right["kind"] >= ENOUGH_KINDS


@lengths.long_form(
    "models/diffusers/test_default_picture.py::test_a_prompt_without_its_words_is_told",
    unkept="the default model draws whatever is written",
)
async def test_words_that_were_never_said_in_training_are_no_error(model: DrawnModel[object]) -> None:
    for words in ("a photo of a cat wearing a hat", "😀", "red " * 150, "房子"):
        drawing = await draw(model, words, steps=2)
        assert pixels_of(drawing.pictures[0].data).shape == (128, 128, 3)


@lengths.long_form(
    "models/diffusers/test_default_picture.py::test_a_prompt_without_its_words_is_told",
    unkept="the default model draws the same of capitals",
)
async def test_capitals_are_no_other_words(model: DrawnModel[object]) -> None:
    small, capitals = [(await draw(model, words, seed=1)).pixels for words in ("a red circle on blue", "A Red CIRCLE On BLUE")]
    assert np.array_equal(small, capitals)


@pytest.mark.parametrize(
    ("words", "side", "blank"),
    [("a white heart", 128, True), ("a white heart", 512, True), ("a red circle", 512, False)],
)
async def test_a_blank_picture_is_told(model: DrawnModel[object], words: str, side: int, blank: bool) -> None:
    """In any size: white on white."""
    drawing = await draw(model, words, seed=1, width=side, height=side)
    assert (BLANK in [piece.text for piece in drawing.pieces if isinstance(piece, Note)]) == blank
