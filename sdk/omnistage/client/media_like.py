"""The types of objects that are accepted as a picture, a sound or a film."""

from __future__ import annotations

from os import PathLike
from typing import Any, Protocol


class Readable(Protocol):
    """A file that was opened in binary mode, or an object with the same `read`."""

    def read(self, size: int, /) -> bytes: ...


class PillowImage(Protocol):
    """A picture of Pillow; it is sent as PNG or TIFF, every pixel unchanged."""

    @property
    def mode(self) -> str: ...

    def save(self, fp: Any, format: str | None = None, **params: Any) -> None: ...


Encoded = bytes | bytearray | memoryview | str | PathLike[str] | Readable
"""An encoded file (PNG, JPEG, WAV, MP3, MP4 ...): its bytes, its path, an open file, or a data: URL."""

ImageLike = Encoded | PillowImage
