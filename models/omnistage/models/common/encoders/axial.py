"""Rotary positions of patches on two axes, row and column, for the heads of a picture encoder."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from omnistage.models.common.encoders.features import Grid

Turn = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of the angles by which the heads of each patch turn, float32 [patches, 1, head size] each."""


def places_of(grids: Sequence[Grid], merge: int, device: torch.device) -> torch.Tensor:
    """Row and column of each patch, int64 [patches, 2]; the patches of an output row are next to each other. merge: patches on the side of
    the square that becomes an output row."""
    return torch.cat([_places(grid, merge, device) for grid in grids])


def _places(grid: Grid, merge: int, device: torch.device) -> torch.Tensor:
    """See `places_of`, for one grid."""
    places = torch.cartesian_prod(torch.arange(grid.height, device=device), torch.arange(grid.width, device=device))
    blocks = places.view(grid.height // merge, merge, grid.width // merge, merge, 2).transpose(1, 2)
    return blocks.reshape(-1, 2).repeat(grid.frames, 1)


def turn_of(places: torch.Tensor, head_size: int, theta: float) -> Turn:
    """Cosines and sines for patches. places: row and column of each patch, [patches, 2]. theta: base of the frequencies. Half of a head's
    pairs turn by the row, half by the column."""
    half = head_size // 2
    frequencies = 1.0 / theta ** (torch.arange(0, half, 2, dtype=torch.float32, device=places.device) / half)
    angles = (places[..., None].float() * frequencies).flatten(1)
    angles = torch.cat((angles, angles), -1)[:, None]
    return angles.cos(), angles.sin()


def turn_heads(x: torch.Tensor, turn: Turn) -> torch.Tensor:
    """Turn the heads by their angles. x: [patches, heads, head size]."""
    wide, (cos, sin) = x.float(), turn
    first, second = wide.chunk(2, -1)
    return (wide * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)
