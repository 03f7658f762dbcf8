"""Values for checkpoints without training: the same bytes on every machine."""

from __future__ import annotations

import hashlib
import math

import torch


def noise(name: str, shape: tuple[int, ...], seed: int, deviation: float = 1.0, mean: float = 0.0) -> torch.Tensor:
    """Uniform numbers of `shape`, float32, with this mean and deviation; they depend only on seed and name."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
    return torch.rand(*shape, generator=generator).sub_(0.5).mul_(math.sqrt(12) * deviation).add_(mean)
