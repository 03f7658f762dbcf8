"""The words that LongCat-Image reads letter by letter: as Diffusers finds them, where it finds the quoted words."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable

import pytest
from diffusers.pipelines.longcat_image import pipeline_longcat_image, pipeline_longcat_image_edit

from omnistage.models.diffusers.longcat import WITH_APOSTROPHE, LongCatPainter, split_quotation

Split = Callable[[str], list[tuple[str, bool]]]

PIECES = ("a dog", " ", "'", '"', "“", "”", "‘", "’", "OPEN", "房子", ".", "\n", "🦊", "x")


@pytest.fixture(scope="module")
def published() -> Split:
    """The function of Diffusers, of a module that nobody has mended."""
    found = importlib.util.find_spec(pipeline_longcat_image.__name__)
    assert found is not None and found.origin is not None
    spec = importlib.util.spec_from_file_location(f"{pipeline_longcat_image.__package__}.untouched", found.origin)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    split: Split = module.split_quotation
    return split


def test_it_is_that_of_diffusers_where_one_word_has_an_apostrophe_at_most(published: Split, seed: int) -> None:
    """Beside quotation marks that are no apostrophes: what begins with one is taken for quoted by Diffusers up to the next apostrophe."""
    assert published is not split_quotation
    rng = random.Random(seed)
    for number in range(500):
        marks = [piece for piece in PIECES if piece != "'"] if number % 2 else PIECES
        pieces = [rng.choice(marks) for _ in range(rng.randrange(12))]
        if number % 2:
            pieces.insert(rng.randrange(len(pieces) + 1), " it's ")
        text = "".join(pieces)
        if len(set(WITH_APOSTROPHE.findall(text))) <= number % 2:
            assert split_quotation(text) == published(text), text


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        ("it's a dog that doesn't bark", []),
        ("they're 'John's and Mary's' shop, isn't it", ["'John's and Mary's'"]),
        ("a sign \"don't you're\" and ‘OPEN’ and “开门”", ["\"don't you're\"", "‘OPEN’", "“开门”"]),
        ("", []),
        ("'", []),
    ],
)
def test_nothing_is_lost_where_several_words_have_one(text: str, quoted: list[str]) -> None:
    parts = split_quotation(text)
    assert "".join(part for part, _ in parts) == text
    assert [part for part, is_quoted in parts if is_quoted] == quoted


def test_thousands_of_them_are_split_as_they_stand() -> None:
    """The function of Diffusers would make a text of gigabytes of these."""
    text = " ".join(f"{chr(97 + n % 26)}{chr(97 + n // 26 % 26)}{chr(97 + n // 676)}'s" for n in range(5000))
    assert split_quotation(text) == [(text, False)]


def test_its_pipelines_use_it() -> None:
    assert LongCatPainter is not None
    assert pipeline_longcat_image.split_quotation is pipeline_longcat_image_edit.split_quotation is split_quotation
