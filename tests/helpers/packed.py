"""Weights in fewer bits, as checkpoints have them."""

from __future__ import annotations

import torch


def in_blocks(name: str, weight: torch.Tensor, block: tuple[int, int]) -> dict[str, torch.Tensor]:
    """The weight in 8-bit floats, and the scales of its blocks."""
    grid = [range(0, size, of) for size, of in zip(weight.shape[-2:], block, strict=True)]
    rows = [[weight[..., top : top + block[0], left : left + block[1]] for left in grid[1]] for top in grid[0]]
    scales = torch.stack([torch.stack([part.abs().amax((-2, -1)) / 448 for part in parts], -1) for parts in rows], -2)
    height, width = weight.shape[-2:]
    spread = scales.repeat_interleave(min(block[0], height), -2).repeat_interleave(min(block[1], width), -1)[..., :height, :width]
    return {name: (weight / spread).to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}
