"""The default model, fetched and converted once for all tests, and its voice, loaded once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from omnistage.models.checkpoint.weights import load_weights
from omnistage.models.smol.code2wav import SmolCode2Wav, load_code2wav
from omnistage.models.smol.store import model_directory
from omnistage.models.smol.talker import SmolTalker, load_talker
from omnistage.models.smol.waveform import SpectrumNet


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The folder with `thinker`, `talker` and `code2wav`."""
    return model_directory()


@pytest.fixture(scope="session")
def talker(default_model: Path) -> Iterator[SmolTalker]:
    model = load_talker(default_model / "talker")
    yield model
    asyncio.run(model.close())


@pytest.fixture(scope="session")
def code2wav(default_model: Path) -> Iterator[SmolCode2Wav]:
    model = load_code2wav(default_model / "code2wav")
    yield model
    asyncio.run(model.close())


@pytest.fixture(scope="session")
def spectra(default_model: Path) -> SpectrumNet:
    """The net of the Code2Wav by itself."""
    net = SpectrumNet()
    load_weights(net, default_model / "code2wav")
    return net
