"""The chain of an omni model, for tests that hold for each of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.omni_family import FAMILIES, OmniFamily, drawn_family, family_params


@pytest.fixture(scope="module", params=family_params())
def omni_family(request: pytest.FixtureRequest) -> OmniFamily:
    """One that is drawn for each module in each run, and in the long form each."""
    return FAMILIES[request.param or drawn_family(request.module.__name__)]


@pytest.fixture(scope="module")
def omni_folder(tmp_path_factory: pytest.TempPathFactory, omni_family: OmniFamily) -> Path:
    """Its checkpoint with random weights, which nobody may write to."""
    from helpers.checkpoints import omni_checkpoint, shared_checkpoint  # here, since most tests need no torch

    return (omni_checkpoint if omni_family.name == "qwen2_5_omni" else shared_checkpoint)(tmp_path_factory)
