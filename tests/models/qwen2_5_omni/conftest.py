"""Thinker, Talker and Code2Wav on the checkpoint with random weights, loaded once for the tests of a file: event loops come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.waves import loaded
from omnistage.models.options import LoadOptions
from omnistage.models.qwen2_5_omni.talker import Qwen2_5Talker, load_talker
from omnistage.models.qwen2_5_omni.thinker import Qwen2_5Thinker, load_thinker
from omnistage.models.qwen2_5_omni.wave.code2wav import FlowCode2Wav


@pytest.fixture
def copied(omni_checkpoint: Path, tmp_path: Path) -> Path:
    """The checkpoint, to be changed: links, which whoever changes a file replaces."""
    for path in omni_checkpoint.iterdir():
        (tmp_path / path.name).symlink_to(path)
    return tmp_path


@pytest.fixture(scope="module")
def thinker(omni_checkpoint: Path) -> Iterator[Qwen2_5Thinker]:
    model = load_thinker(omni_checkpoint, LoadOptions(path=omni_checkpoint, dtype="float32"))
    yield model
    asyncio.run(model.close())


@pytest.fixture(scope="module")
def talker(omni_checkpoint: Path) -> Iterator[Qwen2_5Talker]:
    model = load_talker(omni_checkpoint, LoadOptions(path=omni_checkpoint, dtype="float32"))
    yield model
    asyncio.run(model.close())


@pytest.fixture(scope="module")
def published(omni_checkpoint: Path) -> Iterator[FlowCode2Wav]:
    """As it was published: 9 steps of the Runge-Kutta method."""
    model = loaded(omni_checkpoint)
    yield model
    asyncio.run(model.close())


@pytest.fixture(scope="module")
def brief(omni_checkpoint: Path) -> Iterator[FlowCode2Wav]:
    """With a third of the steps."""
    model = loaded(omni_checkpoint, steps=3)
    yield model
    asyncio.run(model.close())


@pytest.fixture(scope="module")
def quick(omni_checkpoint: Path) -> Iterator[FlowCode2Wav]:
    """Two evaluations: what is claimed has nothing to do with how many there are."""
    model = loaded(omni_checkpoint, solver="euler", steps=2)
    yield model
    asyncio.run(model.close())
