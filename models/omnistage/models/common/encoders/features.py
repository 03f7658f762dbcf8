"""The form in which a Thinker gets media, and their places in a prompt."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
"""Frames as uint8 [frames, height, width, 3]; height and width are multiples of the pixels on a merged row's side."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The numbers of patches of a picture or film: in time (in a film, one patch has two frames), in height and in width."""

    frames: int
    height: int
    width: int

    @property
    def patches(self) -> int:
        return self.frames * self.height * self.width


@dataclass(frozen=True, slots=True)
class MediumExtent:
    """How many rows of a prompt a medium takes. grid: the patches of a picture or film, before they are merged to rows. seconds: duration
    of the frames of one patch; 0 for a picture. sound: number of rows of sound, including the sound of a film."""

    grid: Grid | None = None
    seconds: float = 0.0
    sound: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """A medium as rows for a Thinker. rows: [rows, width], rows of pictures before rows of sound. digest: of everything that the rows were
    made from."""

    extent: MediumExtent
    rows: torch.Tensor
    digest: bytes

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes


@dataclass(frozen=True, slots=True)
class Placed:
    """The place of a medium's rows in a prompt. first: slot of the first row. order: number of the medium's row (pictures before sound)
    that stands at each place, int64 [rows]; None: they stand in their order."""

    first: int
    order: NDArray[np.int64] | None


@dataclass(frozen=True, slots=True)
class PromptLayout:
    """The rows of a prompt. ids: int64 [rows]. positions: int64 [axes, rows]. delta: position minus slot of the rows after the prompt.
    media: places of the media, in order."""

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    delta: int
    media: tuple[Placed, ...]

    def __len__(self) -> int:
        return len(self.ids)
