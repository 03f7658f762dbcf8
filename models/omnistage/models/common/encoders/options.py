"""The options of a Thinker with encoders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from omnistage.models.options import not_negative, validate_options


@dataclass(frozen=True, slots=True)
class ThinkerOptions:
    """Options of a Thinker; 0 leaves a choice to the model. family: name of the family, for humans.

    context: tokens that a conversation and its answer may have together. medium_rows: tokens that a picture or film may have; larger media
    are made smaller. feature_cache_bytes: largest number of bytes of kept features of media. decoders: number of processes that decode
    media. film_fps: frames a second as which the frames of each film count, at any speed; 0: they have their real times."""

    family: ClassVar[str]

    context: int = 0
    medium_rows: int = 0
    feature_cache_bytes: int = 0
    decoders: int = 0
    film_fps: float = 0.0

    @classmethod
    def from_settings(cls, options: Mapping[str, Any]) -> Self:
        """The options, from the settings of a server. Raises LoadError."""
        of = f"the thinker of {cls.family}"
        return not_negative(cls(**validate_options(options, cls(), of)), of)
