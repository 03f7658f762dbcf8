"""The forms of a decoded medium."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Each array is a writable view of a private mapping, whose memory is freed with its last view.


@dataclass(frozen=True, slots=True)
class DecodedPicture:
    """A decoded picture. pixels: uint8 [height, width, 3], RGB, or [height, width, 4], RGBA; upright, resized."""

    pixels: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class DecodedSound:
    """A decoded sound. samples: float32 [n], n >= 1, mono, -1 to 1; recordings in floats may be louder. rate_hz: samples per second."""

    samples: NDArray[np.float32]
    rate_hz: int


@dataclass(frozen=True, slots=True)
class DecodedFilm:
    """Frames of a film. frames: uint8 [n, height, width, 3], RGB, upright, resized. frame_s: seconds of the film for each frame. sound:
    None if it was not asked for."""

    frames: NDArray[np.uint8]
    frame_s: float
    sound: DecodedSound | None = None
