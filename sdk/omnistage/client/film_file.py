"""Films as files."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from omnistage.client.errors import RequestError
from omnistage.client.notebook import films

KINDS = {".webm": "WebM", ".mp4": "MP4"}
"""The kind of file that each ending stands for. A film of another kind may have any name."""

MEDIA_TYPES = {ending: f"video/{name.lower()}" for ending, name in KINDS.items()}
"""The media type of each of these kinds."""


def check_ending(path: str | PathLike[str], media_type: str) -> None:
    """Raises RequestError if the name of a file does not fit a film of this type."""
    ending = Path(path).suffix.lower()
    fit = next((one for one, its_type in MEDIA_TYPES.items() if its_type == media_type), ending)
    if ending != fit:
        hint = f"Give a name that ends in {fit}{'' if ending not in KINDS else f', or ask for media_type={MEDIA_TYPES[ending]!r}'}."
        raise RequestError(f"{path}: this film is {media_type}", hint=hint)


@dataclass(frozen=True, slots=True, repr=False)
class Film:
    """A film as the bytes of a file. media_type: such as video/webm or video/mp4. frames: number of frames. A `Film` can also be sent to a
    model, among `videos`."""

    data: bytes
    media_type: str
    frames: int

    def save(self, path: str | PathLike[str]) -> None:
        """Write a file whose ending fits the type: .webm or .mp4. Raises RequestError for another ending, OSError."""
        check_ending(path, self.media_type)
        Path(path).write_bytes(self.data)

    def _repr_html_(self) -> str:
        """A player, for a notebook."""
        return films([(self.media_type, self.data)])

    def __repr__(self) -> str:
        return f"Film({self.media_type}, {self.frames} frames, {len(self.data)} bytes)"
