"""Noise from which speech is made: of each block by itself, so that it is the same in whichever windows the block is computed."""

from __future__ import annotations

import numpy as np
import torch


def noise(seed: int, first: int, blocks: int, frames: int, width: int) -> torch.Tensor:
    """Standard normal, float32 [blocks * frames, width], on the CPU. seed: of 64 bits. first: block of the speech."""
    # A plain tuple would go through floating point, and seeds above 2^53 with it.
    keys = (np.array((seed, block), np.uint64) for block in range(first, first + blocks))
    drawn = [np.random.Generator(np.random.Philox(key=key)).standard_normal((frames, width), np.float32) for key in keys]
    return torch.from_numpy(np.concatenate(drawn))
