"""The results of decoding: forms of a decoded medium, and the memory in which the decoding process hands arrays to the stage without a
copy."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from omnistage.models.media.terms import BadMedia
from omnistage.models.reports import bytes_told

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


ALIGNMENT = 64
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
"""With these, nobody can change a result that the stage has mapped, or cut it short, which would kill the stage."""


def align(size: int) -> int:
    """The first place from byte `size` on where an array may begin."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class BoundedFile:
    """A file, by its descriptor, to whose end arrays are added. Raises BadMedia beyond `max_bytes`."""

    def __init__(self, file: int, max_bytes: int) -> None:
        self._file = file
        self._max_bytes = max_bytes
        self._size = 0

    def expect(self, size: int) -> None:
        """Raises BadMedia if `size` bytes are too many for the file."""
        if size > self._max_bytes:
            size_text, limit_text = bytes_told(size), bytes_told(self._max_bytes)
            raise BadMedia(f"{size_text} would come out of it, and at most {limit_text} may: send a part of it, or a smaller one")

    def put(self, array: NDArray[np.generic], *, begin: bool = True) -> None:
        """Add an array; `begin` at the next aligned place, else right after the array before it."""
        start = align(self._size) if begin else self._size
        self.expect(start + array.nbytes)
        self._size = start + array.nbytes
        data = memoryview(np.ascontiguousarray(array).data).cast("B")
        while data:
            count = os.pwrite(self._file, data, start)
            data, start = data[count:], start + count
