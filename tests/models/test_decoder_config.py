"""The positions that config.json sets are those that Transformers reads in it."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniDiTConfig, Qwen2_5OmniVisionEncoderConfig
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeCode2WavConfig,
    Qwen3OmniMoeTextConfig,
    Qwen3OmniMoeVisionEncoderConfig,
)

from omnistage.models.checkpoint.decoder import RopeConfig, rope_of, rope_theta_of
from omnistage.models.checkpoint.files import Config

SPELT: list[dict[str, Any]] = [
    {"rope_theta": 500.0},
    {"rope_theta": 500.0, "rope_scaling": None, "rope_parameters": None},
    {"rope_parameters": {"rope_theta": 700.0}},
    {"rope_parameters": {"rope_theta": 700.0}, "rope_theta": 500.0},
    {"rope_parameters": {"mrope_section": [1, 2, 3]}, "rope_theta": 500.0},
    {"rope_parameters": {}, "rope_theta": 500.0},
    {"rope_scaling": {"mrope_section": [1, 2, 3]}, "rope_theta": 500.0},
    {"rope_scaling": {"mrope_section": [1, 2, 3], "rope_theta": 900.0}, "rope_theta": 500.0},
    {
        "rope_scaling": {"mrope_section": [1, 2, 3]},
        "rope_parameters": {"rope_theta": 700.0, "mrope_section": [2, 2, 2]},
        "rope_theta": 500.0,
    },
    {"rope_scaling": {}, "rope_parameters": {"rope_theta": 700.0}},
]


@pytest.mark.parametrize("said", SPELT, ids=str)
def test_positions_of_a_decoder_are_read_as_transformers_reads_them(said: dict[str, Any]) -> None:
    read = Qwen3OmniMoeTextConfig(**copied(said)).rope_parameters
    assert rope_of(Config(said, "config"), axes=3, default_sections=(24, 20, 20)) == RopeConfig(
        read["rope_theta"], tuple(read.get("mrope_section", (24, 20, 20)))
    )


@pytest.mark.parametrize("said", [*SPELT, {}], ids=str)
@pytest.mark.parametrize(
    ("kind", "known"),
    [
        ("axial", Qwen3OmniMoeVisionEncoderConfig),
        ("axial", Qwen2_5OmniVisionEncoderConfig),
        ("default", Qwen3OmniMoeCode2WavConfig),
        ("default", Qwen2_5OmniDiTConfig),
    ],
)
def test_so_are_those_of_encoders_and_code2wavs(said: dict[str, Any], kind: str, known: Any) -> None:
    assert rope_theta_of(Config(said, "config"), kind) == known(**copied(said)).rope_parameters["rope_theta"]


def copied(said: dict[str, Any]) -> dict[str, Any]:
    """Transformers writes into what it is given."""
    return {key: dict(value) if isinstance(value, dict) else value for key, value in said.items()}
