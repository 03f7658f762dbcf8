"""The results of the decoding process: arrays one after another in memory that is handed to the stage, not copied."""

from __future__ import annotations

import fcntl
import os

import numpy as np
from numpy.typing import NDArray

from omnistage.models.media.errors import BadMedia
from omnistage.models.reports import bytes_told

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
        self._most = max_bytes
        self._size = 0

    def expect(self, size: int) -> None:
        """Raises BadMedia if `size` bytes are too many for the file."""
        if size > self._most:
            raise BadMedia(
                f"{bytes_told(size)} would come out of it, and at most {bytes_told(self._most)} may: send a part of it, or a smaller one"
            )

    def put(self, array: NDArray[np.generic], *, begin: bool = True) -> None:
        """Add an array; `begin` at the next aligned place, else right after the array before it."""
        start = align(self._size) if begin else self._size
        self.expect(start + array.nbytes)
        self._size = start + array.nbytes
        data = memoryview(np.ascontiguousarray(array).data).cast("B")
        while data:
            count = os.pwrite(self._file, data, start)
            data, start = data[count:], start + count
