"""Cuts pixels into the patches that a picture encoder takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from omnistage.models.common.encoders.features import Grid, Pixels


class Patching(Protocol):
    """How frames are cut into patches. patch_size: pixels on a side of a patch. frames: frames of a patch. merge: merge * merge patches
    become an output row. channels: number of colours. patch_values: number of values of a patch. film_square: side in pixels of the squares
    in which the published processor counts the bounds of a film's frames, whatever the patches are."""

    @property
    def patch_size(self) -> int: ...
    @property
    def frames(self) -> int: ...
    @property
    def merge(self) -> int: ...
    @property
    def channels(self) -> int: ...
    @property
    def patch_values(self) -> int: ...
    @property
    def film_square(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Normalization:
    """Mean and standard deviation of red, green and blue, by which colours from 0 to 1 are normalized."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


def grid_of(pixels: Pixels, config: Patching) -> Grid:
    """The grid of patches of some frames."""
    frames, height, width, _ = pixels.shape
    return Grid(-(-frames // config.frames), height // config.patch_size, width // config.patch_size)


def patches_of(pixels: Pixels, config: Patching, colours: Normalization) -> torch.Tensor:
    """The patches of frames, float32 [patches of the grid, patch_values]; the patches of an output row are next to each other. The values
    of a patch are in the order colour, frame, row, column, as Transformers' `Qwen2VLImageProcessor` makes them. Copies of the last frame
    fill the last patch."""
    scale = torch.tensor([255.0 * std for std in colours.std])
    shift = torch.tensor([mean / std for mean, std in zip(colours.mean, colours.std, strict=True)])
    frames = torch.from_numpy(pixels)
    if missing := -len(frames) % config.frames:
        frames = torch.cat((frames, frames[-1:].expand(missing, -1, -1, -1)))
    grid = grid_of(pixels, config)
    merge, size = config.merge, config.patch_size
    shape = (grid.frames, config.frames, grid.height // merge, merge, size, grid.width // merge, merge, size, config.channels)
    ordered = frames.view(shape).permute(0, 2, 5, 3, 6, 8, 1, 4, 7)
    values = ordered.reshape(grid.patches, config.channels, -1).float()
    return values.div_(scale[:, None]).sub_(shift[:, None]).view(grid.patches, config.patch_values)
