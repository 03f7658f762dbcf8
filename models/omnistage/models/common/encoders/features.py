"""The form in which a Thinker gets media, and where they stand in a prompt."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
"""Frames as uint8 [frames, height, width, 3]; height and width are multiples of the pixels on a merged row's side."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The numbers of patches of a picture or film: frames: in time (a patch of a film has two frames), height, width."""

    frames: int
    height: int
    width: int

    @property
    def patches(self) -> int:
        return self.frames * self.height * self.width


@dataclass(frozen=True, slots=True)
class MediumExtent:
    """The size of a medium, on which its rows in a prompt depend. grid: the patches of a picture or film, before they are merged to rows;
    None: sound. seconds: duration of the frames of one patch; 0: a picture. sound: number of rows of sound, also of a film's sound."""

    grid: Grid | None = None
    seconds: float = 0.0
    sound: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """A medium as rows for a Thinker. rows: [rows, width], rows of pictures before rows of sound. digest: hash of everything from which the
    rows were made."""

    extent: MediumExtent
    rows: torch.Tensor
    digest: bytes

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes


@dataclass(frozen=True, slots=True)
class Placed:
    """The place of a medium's rows in a prompt. first: slot of the first row. order: for each slot from there on, which row of the medium
    stands there, int64 [rows] (rows of pictures are counted before rows of sound); None: in their order."""

    first: int
    order: NDArray[np.int64] | None


@dataclass(frozen=True, slots=True)
class PromptLayout:
    """The rows of a prompt. ids: int64 [rows]. positions: int64 [axes, rows]. delta: a row after the prompt has the position slot + delta.
    media: places of the media, in order."""

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    delta: int
    media: tuple[Placed, ...]

    def __len__(self) -> int:
        return len(self.ids)
