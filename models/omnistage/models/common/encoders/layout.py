"""Where the rows of media stand in a prompt."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


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
