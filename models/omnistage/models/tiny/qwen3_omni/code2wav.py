"""Code2Wav of a checkpoint of Qwen3-Omni with random weights: its sizes, and the published names and shapes of its weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from omnistage.models.tiny.weights import state_of

PREFIX = "code2wav."

GAINS = ((".q_proj.", 2.0), (".k_proj.", 2.0), (".conv1.", 0.6), (".conv2.", 0.4))
"""By how much matrices enlarge their input, by a part of their names; others by 1. Large gains make attention sharp, so frames differ."""

LAST_GAIN = 0.05
"""Gain of the last convolution: it keeps the sound below full scale, where all sounds would be equal."""

ADDED = 0.5
"""Gain of the output of a layer or a ConvNeXt block, which is added to its input."""


def config(codebooks: int = 16, codes: int = 2048) -> dict[str, Any]:
    """Code2Wav's part of config.json, with frames as long as published. codebooks: codes of a frame. codes: how many ids a codebook has."""
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "codebook_size": codes,
        "decoder_dim": 80,
        "hidden_act": "silu",
        "hidden_size": 40,
        "initializer_range": 0.02,
        "intermediate_size": 56,
        "layer_scale_initial_scale": 0.01,
        "max_position_embeddings": 8000,
        "model_type": "qwen3_omni_moe_code2wav",
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "num_quantizers": codebooks,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000,
        "sliding_window": 13,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
    }


def weights(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of every weight, by published name. config: as from `config`."""
    state = state_of(lambda: Qwen3OmniMoeCode2Wav(Qwen3OmniMoeCode2WavConfig(**config)))
    return {PREFIX + name: tuple(value.shape) for name, value in state.items()}


def distribution(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and deviation of the numbers of a weight, with which the sound is neither silent nor at full scale and depends on all codes."""
    owner, part = name.split(".")[-2:]
    if part in ("bias", "alpha", "beta"):
        return 0.0, 0.1
    if part in ("scale", "gamma"):
        return ADDED, 0.1
    if len(shape) == 1:  # a norm
        return 1.0, 0.1
    if owner == "code_embedding":
        return 0.0, 4.0  # A frame has the mean of sixteen of them.
    # In the decoder two steps of an upsampling meet in each sample; before it they do not.
    inputs = shape[0] * (2 if ".block.1." in name else 1) if _is_transposed(name) else math.prod(shape[1:])
    gain = LAST_GAIN if len(shape) == 3 and shape[0] == 1 else next((gain for part, gain in GAINS if part in name), 1.0)
    return 0.0, gain / math.sqrt(inputs)


def _is_transposed(name: str) -> bool:
    return ".block.1." in name or (".upsample." in name and ".0.conv." in name)
