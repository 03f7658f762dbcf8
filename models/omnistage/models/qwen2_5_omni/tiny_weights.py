"""Random weights under the published names of Qwen2.5-Omni.

They are drawn so that the answers of the model are worth comparing: finite, different for different media, and not one token for ever.
A weight depends on the seed and its own name only, and is made of exact operations, so that every machine makes the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from transformers import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration

from omnistage.models.common.checkpoint import WEIGHTS_INDEX
from omnistage.models.common.fetch import Progress

SHARD_BYTES = 2 << 30

PUBLISHED = (
    ("thinker.model.language_model.", "thinker.model."),
    ("thinker.model.audio_tower.", "thinker.audio_tower."),
    ("thinker.model.visual.", "thinker.visual."),
)
"""How names begin in Transformers, and in the published files."""

GAINS = (
    ("thinker.lm_head.", 3.0),
    ("talker.codec_head.", 3.0),
    ("self_attn.q_proj.", 1.5),
    ("self_attn.k_proj.", 1.5),
    ("self_attn.o_proj.", 2.0),
)
"""By how much a product makes its input larger, where that is not 1. Peaked attention that adds much keeps an answer from running in
circles, since every token depends on all before it."""


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Published name -> shape of every weight of a checkpoint with that config.json."""
    with torch.device("meta"):
        net = Qwen2_5OmniForConditionalGeneration(Qwen2_5OmniConfig(**config))
    return {_published(name): tuple(value.shape) for name, value in net.state_dict().items()}


def write(
    directory: Path, config: Mapping[str, Any], seed: int, dtype: torch.dtype, silent: Mapping[str, frozenset[int]], progress: Progress
) -> None:
    """Write the weights as shards with their index. silent: items that are never the likeliest,
    by the head that would choose them. Code2Wav is float32 in any case, as published."""
    wanted = shapes(config)
    total = sum(math.prod(shape) * _dtype(name, dtype).itemsize for name, shape in wanted.items())
    shards = list(_shards(wanted, -(-total // max(2, -(-total // SHARD_BYTES))), dtype))
    shard_of = {}
    for index, names in enumerate(shards):
        file = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: weight(name, wanted[name], seed, silent.get(name, frozenset())).to(_dtype(name, dtype)) for name in names}
        (directory / file).write_bytes(save(tensors, {"format": "pt"}))
        shard_of.update(dict.fromkeys(names, file))
        progress("writing the weights", (index + 1) / len(shards))
    listing = {"metadata": {"total_size": total}, "weight_map": dict(sorted(shard_of.items()))}
    (directory / WEIGHTS_INDEX).write_text(json.dumps(listing, indent=2) + "\n")


def weight(name: str, shape: tuple[int, ...], seed: int, silent: frozenset[int] = frozenset()) -> torch.Tensor:
    """One weight, float32. silent: rows of zeros."""
    mean, deviation = _distribution(name, shape)
    values = noise(name, shape, seed).mul_(deviation).add_(mean)
    values[sorted(silent)] = 0.0
    return values


def noise(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Uniform, of mean 0 and deviation 1, float32."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
    return torch.rand(*shape, generator=generator).sub_(0.5).mul_(math.sqrt(12))


def _published(name: str) -> str:
    for here, there in PUBLISHED:
        if name.startswith(here):
            return there + name.removeprefix(here)
    return name


def _dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if name.startswith("token2wav.") else dtype


def _shards(wanted: Mapping[str, tuple[int, ...]], limit: int, dtype: torch.dtype) -> Iterator[list[str]]:
    """The names in the order of the model, in groups of about `limit` bytes."""
    group: list[str] = []
    size = 0
    for name, shape in wanted.items():
        if size >= limit:
            yield group
            group, size = [], 0
        group.append(name)
        size += math.prod(shape) * _dtype(name, dtype).itemsize
    yield group


def _distribution(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and deviation of a weight."""
    owner = name.split(".")[-2]
    if name.endswith(".bias"):
        return 0.0, 0.1
    if owner == "act":  # the snakes of the vocoder: logarithms of their frequencies and inverse heights
        return 0.0, 0.1
    if len(shape) == 1:  # a norm
        return 1.0, 0.1
    if owner in ("embed_tokens", "audio_bos_eos_token", "codec_embed"):
        return 0.0, 1.0
    inputs = math.prod(shape[1:])
    if ".ups." in name:  # transposed: [in, out, kernel], of which every output meets one kernel's part of each stride
        inputs = shape[0] * 2
    gain = next((gain for part, gain in GAINS if part in name), 1.0)
    return 0.0, gain / math.sqrt(inputs)
