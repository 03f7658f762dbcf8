"""The materials of a decoder's parts: its sizes, weights and products, and the ranks that compute it together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from omnistage.engine.group import Group
from omnistage.engine.linear import Linear, Linears

Weights = Callable[[str], torch.Tensor | None]
"""Returns the tensor of a name, or None if there is none."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes and constants of a `PackedDecoder`. Everything else about it is a part: see `decoder.DecoderParts`.

    ffn_size: columns of the feed-forward. context: rows that a sequence may have. head_size: numbers of a head; 0: hidden_size /
    query_heads. embedding_width: width of an item's embedding; 0: hidden_size. codebooks: number of ids in an item; the decoder embeds the
    first id, and `entry` the others. further_ids: the other ids are below this number; 0: vocab_size. given_width: width of a vector that a
    request gives for a row; 0: hidden_size."""

    layers: int
    hidden_size: int
    ffn_size: int
    query_heads: int
    kv_heads: int
    vocab_size: int
    context: int
    norm_eps: float
    head_size: int = 0
    embedding_width: int = 0
    given_width: int = 0
    codebooks: int = 1
    further_ids: int = 0

    def __post_init__(self) -> None:
        defaults = {
            "head_size": self.hidden_size // self.query_heads,
            "embedding_width": self.hidden_size,
            "given_width": self.hidden_size,
            "further_ids": self.vocab_size,
        }
        for name, default in defaults.items():
            if not getattr(self, name):
                object.__setattr__(self, name, default)


@dataclass(frozen=True, slots=True)
class Materials:
    """The materials from which the parts of a decoder are built. config: the sizes of this rank, with its own heads and columns only.
    weight: returns the weights of this rank. linear: makes a product; a part makes all its products with it, so that they are tried out at
    load. group: all ranks. dtype, device: of the decoder. Every method raises ValueError for a weight that is missing or misshapen."""

    config: DecoderConfig
    weight: Weights
    linear: Linears
    group: Group
    dtype: torch.dtype
    device: torch.device

    def need(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return need(self.weight, name, shape)

    def fuse(self, prefix: str, sizes: Mapping[str, int], width: int) -> Linear:
        """One product of several weights, joined along their outputs. prefix, sizes: the weights are prefix.name.weight, [size, width], for
        each name and size of `sizes`. width: numbers of an input row."""
        matrix = torch.cat([self.need(f"{prefix}.{name}.weight", (size, width)) for name, size in sizes.items()])
        return self.linear(matrix, self.fused_bias(prefix, sizes))

    def fused_bias(self, prefix: str, sizes: Mapping[str, int]) -> torch.Tensor | None:
        """The biases of several weights, joined; None if there are none, or if all numbers are zero. sizes: as in `fuse`."""
        biases = {name: bias for name in sizes if (bias := self.weight(f"{prefix}.{name}.bias")) is not None}
        if not biases:
            return None
        if len(biases) != len(sizes):
            raise ValueError(f"the checkpoint has a bias for only some of {prefix}.{tuple(sizes)}")
        for name, bias in biases.items():
            _check_shape(f"{prefix}.{name}.bias", bias, (sizes[name],))
        bias = torch.cat([*biases.values()])
        return bias if bool(bias.any()) else None


def need(weight: Weights, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The weight of this name. Raises ValueError if it is missing or has another shape, before the caller allocates memory of the expected
    size."""
    tensor = weight(name)
    if tensor is None:
        raise ValueError(f"the checkpoint has no weight {name!r}")
    _check_shape(name, tensor, shape)
    return tensor


def _check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ValueError(f"the weight {name!r} is {list(tensor.shape)}, and by the config it is {list(shape)}")
