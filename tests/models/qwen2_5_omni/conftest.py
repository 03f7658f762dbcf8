"""Thinker, Talker and Code2Wav on the checkpoint with random weights, loaded once for the tests of a file: event loops come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.checkpoints import linked
from helpers.waves import loaded
from omnistage.models.options import LoadOptions
from omnistage.models.qwen2_5_omni.talker import load_talker
from omnistage.models.qwen2_5_omni.thinker import load_thinker


@pytest.fixture
def copied(omni_checkpoint: Path, tmp_path: Path) -> Path:
    """The checkpoint, to be changed."""
    return linked(omni_checkpoint, tmp_path)


def _shared(load: Callable[[Path], Any]) -> Any:
    """A fixture: a model of the checkpoint, loaded so."""

    @pytest.fixture(scope="module")
    def model(omni_checkpoint: Path) -> Iterator[Any]:
        shared = load(omni_checkpoint)
        yield shared
        asyncio.run(shared.close())

    return model


thinker = _shared(lambda folder: load_thinker(folder, LoadOptions(path=folder, dtype="float32")))
talker = _shared(lambda folder: load_talker(folder, LoadOptions(path=folder, dtype="float32")))
published = _shared(loaded)
"""As it was published: 9 steps of the Runge-Kutta method."""
brief = _shared(lambda folder: loaded(folder, steps=3))
"""With a third of the steps."""
quick = _shared(lambda folder: loaded(folder, solver="euler", steps=2))
"""Two evaluations: what is claimed has nothing to do with how many there are."""
