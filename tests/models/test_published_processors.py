"""The parts of the tests that stand for parts of a published processor prepare media as that processor does.

The parts, by the helper that has them. `omni_reference`: Pillow's backend for pictures (`Qwen2VLImageProcessorPil`), our
decoder and patches for the frames of films, one second of silence in place of the minutes behind sounds, the rows of a sound, the filling
of the prompt, the rows of a heard film, the seconds of its frames. `drawn`: the processor of pictures to be edited (`load_processor`)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from helpers import lengths, published
from helpers.drawings import checkpoint
from helpers.omni_reference import OmniReference, Qwen3Reference
from helpers.published_processor import medium
from helpers.saved_processor import Conversation, inputs
from omnistage.models.diffusers.folder import load_processor
from omnistage.models.media.decoder import MediaDecoder

FEATURE_TOLERANCE = 1e-5
PIXELS = {"pixel_values", "pixel_values_videos"}
MAX_LEVELS, MEAN_LEVELS = 2, 0.5
"""By so many levels of 255 pixels differ: the processor resizes by torchvision, which rounds otherwise than Pillow."""
DRAWN = 15
DRAWN_VALUES = 20_000
IN_THE_IDS = {"attention_mask", "mm_token_type_ids"}
"""Arrays that say nothing of a prompt alone which its ids do not say."""

Prepare = Callable[[Sequence[Conversation]], list[published.Arrays]]


@pytest.fixture(scope="module", params=published.CLASSES)
def architecture(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(architecture: str, request: pytest.FixtureRequest) -> Path:
    if architecture == "qwen-image-edit":
        return checkpoint(architecture) / "processor"
    made: Path = request.getfixturevalue({"qwen2.5-omni": "omni_checkpoint", "qwen3-omni": "qwen3_checkpoint"}[architecture])
    return made


@pytest.fixture(scope="module")
def prepare(architecture: str, folder: Path) -> Iterator[Prepare]:
    """Prepares conversations as the tests do."""
    if architecture == "qwen-image-edit":
        yield lambda conversations: [dict(inputs(load_processor(folder), one, medium, return_tensors="np")) for one in conversations]
        return
    reference = {"qwen2.5-omni": OmniReference, "qwen3-omni": Qwen3Reference}[architecture](folder)
    yield lambda conversations: asyncio.run(prepared(reference, conversations))


async def prepared(reference: OmniReference, conversations: Sequence[Conversation]) -> list[published.Arrays]:
    decoder, made = MediaDecoder(), []
    for turns in map(published.turns_of, conversations):
        ids, arrays = reference.inputs(turns, await reference.read(turns, decoder))
        made.append(
            {"input_ids": ids.numpy(), **{name: np.asarray(array) for name, array in arrays.items() if not isinstance(array, bool)}}
        )
    await decoder.close()
    return [without_silence(arrays) for arrays in made]


def without_silence(arrays: published.Arrays) -> published.Arrays:
    if "input_features" not in arrays:
        return arrays
    mask = arrays["feature_attention_mask"]
    frames = mask.sum(-1).max()
    return {**arrays, "input_features": arrays["input_features"][:, :, :frames], "feature_attention_mask": mask[:, :frames]}


def check(ours: published.Digest, theirs: published.Digest, deviations: tuple[float, ...]) -> None:
    """deviations: the standard deviations by which the colours are divided."""
    assert ours.keys() - IN_THE_IDS == theirs.keys() - IN_THE_IDS
    for name in sorted(theirs.keys() - IN_THE_IDS):
        made = theirs[name]
        if not isinstance(made, dict):
            assert ours[name] == made, name
            continue
        assert ours[name]["shape"] == made["shape"], name
        apart = np.abs(np.subtract(ours[name]["values"], made["values"]))
        if name in PIXELS:
            levels = apart * 255 * min(deviations)
            print(name, levels.max(), levels.mean())
            assert levels.max() < MAX_LEVELS + 0.1 and levels.mean() < MEAN_LEVELS, name
        else:
            assert apart.max() <= FEATURE_TOLERANCE, name


def deviations_of(folder: Path) -> tuple[float, ...]:
    settings: Any = Qwen2VLImageProcessorPil.from_pretrained(folder, local_files_only=True)
    return tuple(settings.image_std)


def test_media_are_prepared_as_the_published_processor_did(architecture: str, folder: Path, prepare: Prepare) -> None:
    """A file keeps what it made."""
    conversations, theirs = zip(*published.kept(architecture), strict=True)
    for ours, made in zip(prepare(conversations), theirs, strict=True):
        check(published.digest(ours), made, deviations_of(folder))


@lengths.long_form("models/test_published_processors.py::test_media_are_prepared_as_the_published_processor_did")
def test_media_are_prepared_as_the_published_processor_does(architecture: str, folder: Path, prepare: Prepare, seed: int) -> None:
    """The processor itself, and torchvision, which is installed apart; with other media in each run."""
    kept_conversations, kept = zip(*published.kept(architecture), strict=True)
    drawn = published.draw(architecture, random.Random(seed), DRAWN)
    theirs = published.processed(architecture, folder, [*kept_conversations, *drawn])
    assert [published.digest(made) for made in theirs[: len(kept)]] == list(kept)
    for ours, made in zip(prepare(drawn), theirs[len(kept) :], strict=True):
        check(published.digest(ours, DRAWN_VALUES), published.digest(made, DRAWN_VALUES), deviations_of(folder))
