"""What people say to a model: turns of text and media, and what its answer must keep to. Plain Python."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Literal

Medium = Literal["text", "image", "audio", "video"]


@dataclass(frozen=True, slots=True)
class Media:
    """A picture, sound or film as it was sent. media_type: such as image/png, in lower case, not checked against the bytes.
    use_audio: of a film, its sound too. background: red, green and blue, what is transparent lies on it; None: the model's own choice."""

    media_type: str
    data: bytes = field(repr=False)
    use_audio: bool = False
    background: tuple[int, int, int] | None = None

    @property
    def kind(self) -> str:
        """Such as image; which format it is the content says."""
        return kind_of(self.media_type)

    @property
    def digest(self) -> bytes:
        """SHA-256 of the bytes: equal media need to be computed once. It takes 1 ms for each 0.5 to 2 MB: ask once, on a thread, for what
        is not refused."""
        return hashlib.sha256(self.data).digest()


@dataclass(frozen=True, slots=True)
class Streamed:
    """Media that come piece by piece on an input port of the model, which no other part names.

    Of a port of content media: media_type, use_audio, background: as in Media; no type where none was said. total_bytes: of the whole file;
    0: not known yet.
    """

    port: str
    media_type: str = ""
    use_audio: bool = False
    total_bytes: int = 0
    background: tuple[int, int, int] | None = None

    @property
    def kind(self) -> str:
        """As of Media; empty for live sound."""
        return kind_of(self.media_type)


def kind_of(media_type: str) -> str:
    """What a type says that media are: image, audio or video, of those that are taken."""
    return media_type.partition("/")[0]


Part = str | Media | Streamed
"""A piece of a turn, where it stands."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a conversation. role: system, user or assistant."""

    role: str
    parts: tuple[Part, ...]

    @property
    def text(self) -> str:
        """Its text alone, for a model that takes nothing else."""
        return "".join(part for part in self.parts if isinstance(part, str))


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the text must keep to. form: json_schema, regex or choice. text: the schema or expression; choices: the text is one of these."""

    form: str
    text: str = ""
    choices: tuple[str, ...] = ()
