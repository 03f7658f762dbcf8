"""Random weights under the published names of Qwen2.5-Omni.

They are drawn so that the model's answers are worth comparing: finite, different for different media, and not one token for ever. A weight
depends only on the seed and its own name, and is made by exact operations, so that every machine makes the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration

from omnistage.models.reports import ShowProgress
from omnistage.models.tiny.omni import added_gains, published_name
from omnistage.models.tiny.weights import state_of, write_weights

GAINS = (
    ("thinker.lm_head.", 3.0),
    ("talker.codec_head.", 3.0),
    (".self_attn.q_proj.", 2.1),
    (".self_attn.k_proj.", 2.1),
    (".resblocks.", 0.5),
    (".conv_post.", 0.2),
)
"""By how much matrices enlarge their input, by a part of their names; others by 1. Large gains in attention make it sharp, so an answer
does not repeat one token; small gains in the vocoder keep its sound below full scale."""

DECODERS = {"thinker.model.": ("thinker_config", "text_config"), "talker.model.": ("talker_config",)}
"""The beginnings of the names of the decoders' weights, and the place of their sizes in the config."""


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of every weight of a checkpoint with this config.json, by published name."""
    state = state_of(lambda: Qwen2_5OmniForConditionalGeneration(Qwen2_5OmniConfig(**config)))
    return {published_name(name): tuple(value.shape) for name, value in state.items()}


def write(directory: Path, config: Mapping[str, Any], seed: int, dtype: torch.dtype, progress: ShowProgress) -> None:
    """Write the weights as shards with their index. Code2Wav is always float32, as published. Ids of the heads that are no token or no code
    are as likely as any other, as in published checkpoints: a server must ban them."""
    distribution = partial(_distribution, adds=added_gains(config, DECODERS))
    write_weights(directory, shapes(config), seed, distribution, partial(_dtype, dtype=dtype), progress)


def _dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if name.startswith("token2wav.") else dtype


def _distribution(name: str, shape: tuple[int, ...], adds: Mapping[str, float]) -> tuple[float, float]:
    """Mean and deviation of the numbers of a weight. adds: as from added_gains."""
    owner = name.split(".")[-2]
    if name.endswith(".bias"):
        return 0.0, 0.1
    if owner == "act":  # the snakes of the vocoder: logarithms of their frequencies and inverse heights
        return 0.0, 0.1
    if len(shape) == 1:  # a norm
        return 1.0, 0.1
    if owner in ("embed_tokens", "audio_bos_eos_token", "codec_embed"):
        return 0.0, 1.0
    inputs = shape[0] * 2 if ".ups." in name else math.prod(shape[1:])  # two steps of a transposed convolution meet in each sample
    gain = next((gain for part, gain in GAINS if part in name), 1.0)
    if owner in ("o_proj", "down_proj"):
        gain = next((gain for prefix, gain in adds.items() if name.startswith(prefix)), gain)
    return 0.0, gain / math.sqrt(inputs)
