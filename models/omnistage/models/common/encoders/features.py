"""The form in which a model takes media, and their place in a prompt."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
"""Frames as uint8 [frames, height, width, 3]; both sides are multiples of the side of a merged row."""


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
class MediumExtent:
    """The part of a prompt that a medium takes. grid: the patches of a picture or film, before rows are merged. seconds: duration of one
    frame of the grid. sound: rows of sound, including the sound of a film."""

    grid: Grid | None = None
    seconds: float = 0.0
    sound: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """A medium as a Thinker takes it. rows: [rows, width], rows of pictures before rows of sound. digest: of everything that the rows were
    made from."""

    extent: MediumExtent
    rows: torch.Tensor
    digest: bytes

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes


@dataclass(frozen=True, slots=True)
class Placed:
    """Rows of a medium in a prompt. first: place of the first row. order: which of the medium's rows (pictures before sound) stands at each
    place, int64 [rows]; None: they stand in their order."""

    first: int
    order: NDArray[np.int64] | None


@dataclass(frozen=True, slots=True)
class PromptLayout:
    """A prompt. ids: int64 [rows]. positions: int64 [axes, rows]. delta: position minus slot of the rows after the prompt. media: in
    order."""

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    delta: int
    media: tuple[Placed, ...]

    def __len__(self) -> int:
        return len(self.ids)
