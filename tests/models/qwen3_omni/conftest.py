"""Code2Wav on random weights, loaded once for all tests: event loops come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.causal_waves import OTHER, loaded, written
from omnistage.models.qwen3_omni.wave.code2wav import CausalCode2Wav
from omnistage.models.tiny import qwen3_omni as tiny


@pytest.fixture(scope="session")
def wave_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of Code2Wav alone: in the sizes of make-tiny, and in others."""
    base = tmp_path_factory.mktemp("waves")
    return {name: written(base / name, config, 5) for name, config in (("tiny", tiny.code2wav_config()), ("other", OTHER))}


def _shared(name: str) -> Any:
    """A fixture: the Code2Wav of one of these checkpoints."""

    @pytest.fixture(scope="session")
    def model(wave_folders: dict[str, Path]) -> Iterator[CausalCode2Wav]:
        shared = loaded(wave_folders[name])
        yield shared
        asyncio.run(shared.close())

    return model


wave, other_wave = _shared("tiny"), _shared("other")
