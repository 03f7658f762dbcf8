"""Holds the codes of a speech while a window still needs them. No torch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from omnistage.models.interface import BadRequest


class Codes:
    """Holds the frames of codes of a speech. first: number of the first frame that is needed; earlier frames may come and are dropped.
    width: number of codes in a frame. `_past`: see `came`; None: no frame came."""

    def __init__(self, first: int, width: int) -> None:
        self._first = first
        self._frames = np.empty((0, width), np.int64)
        self._past: int | None = None

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def came(self) -> int:
        """Number of the last frame that came, plus 1; 0: none came."""
        return self._past or 0

    @property
    def past(self) -> int:
        """Number of the last frame that is held, plus 1."""
        return self._first + len(self)

    def add(self, first: int, frames: NDArray[np.int64]) -> None:
        """Add the next frames, [n, width]. first: number of the first of these frames; only the first call uses it. Raises BadRequest if
        the first needed frame was skipped."""
        if not len(frames):
            return
        if self._past is None:
            if first > self._first:
                raise BadRequest("codes", f"code {self._first} and those behind it are needed; the first that came is number {first}")
            self._past = first
        needless = max(self._first - self._past, 0)
        self._past += len(frames)
        self._frames = np.concatenate((self._frames, frames[needless:]))

    def between(self, first: int, past: int) -> NDArray[np.int64]:
        """The held frames from number `first` up to, and without, number `past`."""
        return self._frames[first - self._first : past - self._first]

    def forget(self, place: int) -> None:
        """Drop the frames before number `place`."""
        self._frames = self._frames[place - self._first :]
        self._first = place
