"""Random weights, the same bytes on every machine, in the layout of published checkpoints: shards, and their index."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers.utils.logging import get_verbosity, set_verbosity

from omnistage.models.checkpoint.files import WEIGHTS_INDEX
from omnistage.models.reports import ShowProgress
from omnistage.models.tiny.makers import write_json


def noise(name: str, shape: tuple[int, ...], seed: int, deviation: float = 1.0, mean: float = 0.0) -> torch.Tensor:
    """Uniform numbers of `shape`, float32, with this mean and deviation; they depend only on seed and name."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
    return torch.rand(*shape, generator=generator).sub_(0.5).mul_(math.sqrt(12) * deviation).add_(mean)


SHARD_BYTES = 2 << 30

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of weights by name, in the order of the model."""


def state_of(build: Callable[[], torch.nn.Module]) -> dict[str, torch.Tensor]:
    """The weights of a model of Transformers by name, without memory. Warnings about the form of published configs are silenced."""
    verbosity = get_verbosity()
    set_verbosity(logging.ERROR)
    try:
        with torch.device("meta"):
            return build().state_dict()
    finally:
        set_verbosity(verbosity)


def write_weights(
    directory: Path,
    shapes: Shapes,
    seed: int,
    distribution: Callable[[str, tuple[int, ...]], tuple[float, float]],
    dtype_of: Callable[[str], torch.dtype],
    progress: ShowProgress,
) -> None:
    """Write all weights. distribution: mean and deviation of a weight, by name and shape. dtype_of: the type in which it is stored."""
    total = sum(math.prod(shape) * dtype_of(name).itemsize for name, shape in shapes.items())
    shards = list(_shards(shapes, -(-total // max(2, -(-total // SHARD_BYTES))), dtype_of))
    shard_of = {}
    for index, names in enumerate(shards):
        file = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        tensors = {}
        for name in names:
            mean, deviation = distribution(name, shapes[name])
            tensors[name] = noise(name, shapes[name], seed, deviation, mean).to(dtype_of(name))
        save_file(tensors, directory / file, {"format": "pt"})
        shard_of.update(dict.fromkeys(names, file))
        progress("writing the weights", (index + 1) / len(shards))
    listing = {"metadata": {"total_size": total}, "weight_map": dict(sorted(shard_of.items()))}
    write_json(directory / WEIGHTS_INDEX, listing)


def _shards(shapes: Shapes, limit: int, dtype_of: Callable[[str], torch.dtype]) -> Iterator[list[str]]:
    """Yield the names of weights in the order of the model, in groups of about `limit` bytes."""
    group: list[str] = []
    size = 0
    for name, shape in shapes.items():
        if size >= limit:
            yield group
            group, size = [], 0
        group.append(name)
        size += math.prod(shape) * dtype_of(name).itemsize
    yield group
