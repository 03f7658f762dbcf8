"""Makes the noise from which speech is made. Each block of a speech has noise of its own, the same in every window."""

from __future__ import annotations

import numpy as np
import torch


def noise(seed: int, first: int, blocks: int, frames: int, width: int) -> torch.Tensor:
    """Standard normal noise of consecutive blocks, float32 [blocks * frames, width], on the CPU. seed: 64 bits. first: number of the first
    block in its speech. frames: frames of a block."""
    # An array, because NumPy would convert a tuple by way of floating point, which rounds seeds above 2^53.
    keys = (np.array((seed, block), np.uint64) for block in range(first, first + blocks))
    arrays = [np.random.Generator(np.random.Philox(key=key)).standard_normal((frames, width), np.float32) for key in keys]
    return torch.from_numpy(np.concatenate(arrays))
