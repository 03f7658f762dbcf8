"""Random weights, the same bytes on every machine. Libraries say which weights a model has, and write them in the published layout."""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub import save_torch_state_dict
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils.logging import get_verbosity, set_verbosity

from omnistage.models.reports import ShowProgress

SHARD_BYTES = 2 << 30

State = Mapping[str, torch.Tensor]
Types = Mapping[str, torch.dtype]
"""Types of weights. The first key counts that, as a pattern, is in a weight's name."""
Value = TypeVar("Value")


def noise(name: str, shape: tuple[int, ...], seed: int, deviation: float = 1.0, mean: float = 0.0) -> torch.Tensor:
    """Uniform numbers of `shape`, float32, with this mean and deviation; they depend only on seed and name."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
    return torch.rand(*shape, generator=generator).sub_(0.5).mul_(math.sqrt(12) * deviation).add_(mean)


@dataclass(frozen=True, slots=True)
class WeightDistribution:
    """Means and deviations of weights. Each key is a pattern that is searched in a weight's name; the first that is there counts.

    constants: mean and deviation of weights that do not depend on the number of inputs. gains: by how much a norm or a matrix enlarges its
    input; others do by 1. steps: for transposed convolutions, how many of their steps meet in a sample.
    """

    constants: Mapping[str, tuple[float, float]]
    gains: Mapping[str, float] = field(default_factory=dict)
    steps: Mapping[str, int] = field(default_factory=dict)

    def draw(self, name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
        """Random numbers for a weight, float32."""
        if constant := _search(self.constants, name):
            mean, deviation = constant
        elif len(shape) == 1:  # a norm
            mean, deviation = _search(self.gains, name) or 1.0, 0.1
        else:
            steps = _search(self.steps, name)
            inputs = shape[0] * steps if steps else math.prod(shape[1:])  # A transposed convolution has its inputs on the first axis.
            mean, deviation = 0.0, (_search(self.gains, name) or 1.0) / math.sqrt(inputs)
        return noise(name, shape, seed, deviation, mean)


def _search(table: Mapping[str, Value], name: str) -> Value | None:
    """The first value whose key, a pattern, is in the name; None: there is none."""
    return next((value for pattern, value in table.items() if re.search(pattern, name)), None)


def published_weights(kind: Any, config: Mapping[str, Any], state: State | None = None) -> dict[str, torch.Tensor]:
    """Weights by their published names. kind: a class of Transformers' models. config: the contents of its config.json. state: weights by
    the names that the class uses; None: all those of the model, without memory."""
    verbosity = get_verbosity()
    set_verbosity(logging.ERROR)  # It warns of the form of published configs.
    try:
        with torch.device("meta"):
            model = kind(kind.config_class(**deepcopy(dict(config))))
        return dict(revert_weight_conversion(model, dict(state or model.state_dict())))
    finally:
        set_verbosity(verbosity)


def write_weights(directory: Path, state: State, seed: int, distribution: WeightDistribution, types: Types, progress: ShowProgress) -> None:
    """Write random weights as two or more shards with their index. state: has their names and shapes. types: in which they are stored."""
    weights: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        progress("writing the weights", len(weights) / len(state))
        weights[name] = distribution.draw(name, tuple(value.shape), seed).to(_search(types, name))
    sizes = [value.nbytes for value in weights.values()]
    shards = max(2, -(-sum(sizes) // SHARD_BYTES))
    # A shard has room for one weight more than its share, so no shard is too small.
    save_torch_state_dict(weights, directory, max_shard_size=-(-sum(sizes) // shards) + max(sizes))
    progress("writing the weights", 1.0)
