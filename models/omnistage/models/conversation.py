"""A conversation of people with a model: turns of text and media, and the constraint on the answer. Plain Python."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Literal

Medium = Literal["text", "image", "audio", "video"]
ConstraintForm = Literal["json_schema", "regex", "choice"]


@dataclass(frozen=True, slots=True)
class Media:
    """A picture, sound or film as it was sent. media_type: such as image/png, in lower case, not compared with the bytes. use_audio: for a
    film, whether its sound is used. background: red, green and blue behind transparent parts, 0 to 255; None: the model chooses."""

    media_type: str
    data: bytes = field(repr=False)
    use_audio: bool = False
    background: tuple[int, int, int] | None = None

    @property
    def kind(self) -> str:
        """The kind of the medium: image, audio or video."""
        return kind_of(self.media_type)

    @property
    def digest(self) -> bytes:
        """SHA-256 of the bytes, by which equal media are computed only once. It takes 1 ms for each 0.5 to 2 MB, so call it once, on a
        thread, after the request was checked."""
        return hashlib.sha256(self.data).digest()


@dataclass(frozen=True, slots=True)
class Streamed:
    """A medium that comes in pieces on an input port of the model; no other part names that port.

    media_type, use_audio, background: as in Media, on a port of content media; media_type is empty if none was given. total_bytes: size of
    the whole file; 0: not known yet."""

    port: str
    media_type: str = ""
    use_audio: bool = False
    total_bytes: int = 0
    background: tuple[int, int, int] | None = None

    @property
    def kind(self) -> str:
        """The kind of the medium: image, audio or video; empty: live sound without a media type."""
        return kind_of(self.media_type)


def kind_of(media_type: str) -> str:
    """The kind of a media type, which is its part before the slash: image, audio or video; empty for an empty type."""
    return media_type.partition("/")[0]


Part = str | Media | Streamed
"""A part of a turn: text, or a medium."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a conversation. role: system, user or assistant."""

    role: str
    parts: tuple[Part, ...]

    @property
    def text(self) -> str:
        """The texts of the turn, joined, for a model that takes only text."""
        return "".join(part for part in self.parts if isinstance(part, str))


@dataclass(frozen=True, slots=True)
class TextConstraint:
    """A constraint on a text. form: json_schema, regex or choice. text: the schema or the expression. choices: texts, of which the answer
    must be one."""

    form: ConstraintForm
    text: str = ""
    choices: tuple[str, ...] = ()
