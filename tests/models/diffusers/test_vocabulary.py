"""The description of a checkpoint of few words, and the answer to a prompt that has none of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from helpers.command import omnistage
from omnistage.gateway.state import EXAMPLES
from omnistage.models.checkpoint.files import BadCheckpoint
from omnistage.models.diffusers.family import model_directory
from omnistage.models.diffusers.options import Vocabulary
from omnistage.router.pipeline import load_pipeline
from tools.pictures.pack import DEFAULTS
from tools.pictures.scenes import KINDS

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", ROOT / "Makefile", *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md"), ROOT / "sdk/omnistage/cli/main.py"]
SIZE = (128, 128)
DRAWS = "this model draws coloured shapes: circle, square, triangle, star, heart"
NONE = f"{DRAWS}; this prompt names none of them"
NO_COLOUR = f"{DRAWS}; this prompt names none of: red, orange, yellow, green, blue, purple, pink, black, white, violet"
SIZED = "this model was made for 128x128 pixels: at other sizes much is misplaced, or missing"


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
    assert list(shipped.notes(prompt, SIZE, SIZE)) == notes


def test_of_many_words_a_note_names_the_first() -> None:
    many = Vocabulary("letters", {"letter": ("a",), "mark": tuple(f"mark{chr(n)}" for n in range(97, 123))})
    (note,) = many.notes("a", SIZE, SIZE)
    assert note.endswith("markk, markl, ...")


def test_another_size_than_its_own_is_told(shipped: Vocabulary) -> None:
    assert list(shipped.notes("a red circle", (512, 512), SIZE)) == [SIZED]
    assert list(shipped.notes("a cat", (128, 96), SIZE)) == [NONE, SIZED]


def test_a_checkpoint_that_says_nothing_of_this_has_no_notes(tmp_path: Path) -> None:
    for said in (None, {"width": 64}):
        if said is not None:
            (tmp_path / "omnistage.json").write_text(json.dumps(said))
        vocabulary = Vocabulary.of(tmp_path)
        assert list(vocabulary.notes("a cat", (64, 64), (32, 32))) == []
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
    assert [prompt for prompt in prompts if list(shipped.notes(prompt, SIZE, SIZE))] == []
