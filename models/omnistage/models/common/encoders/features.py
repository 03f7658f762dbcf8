"""What a model takes of media, and where it stands in a prompt."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
"""Frames as they are, [frames, height, width, 3]; sides are multiples of those of a merged row."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Patches of a picture or film: frames (two pictures of a film are one), rows, columns."""

    frames: int
    height: int
    width: int

    @property
    def patches(self) -> int:
        return self.frames * self.height * self.width


@dataclass(frozen=True, slots=True)
class Extent:
    """What a medium takes of the prompt. grid: of a picture or film, before rows are merged. seconds: that one frame of the grid lasts.
    sound: rows of sound, that of a film included."""

    grid: Grid | None = None
    seconds: float = 0.0
    sound: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """A medium as a Thinker takes it. rows: [rows, width], those of pictures before those of sound. digest: of everything that they were
    made from."""

    extent: Extent
    rows: torch.Tensor
    digest: bytes

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes


@dataclass(frozen=True, slots=True)
class Placed:
    """Rows of a medium in a prompt. first: the first of them. order: which of its rows (those of pictures before those of sound) stands
    where, int64 [rows]; None: they stand as they are."""

    first: int
    order: NDArray[np.int64] | None


@dataclass(frozen=True, slots=True)
class Layout:
    """A prompt. ids: int64 [rows]. positions: int64 [axes, rows]. delta: position minus slot of the rows behind it. media: in order."""

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    delta: int
    media: tuple[Placed, ...]

    def __len__(self) -> int:
        return len(self.ids)
