"""The options of a Talker that speaks rows of a Thinker, and what those of a Code2Wav may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from omnistage.models.options import checked_options, not_negative

MOST_WORKERS = 64
"""Threads of a Code2Wav that compute side by side."""


@dataclass(frozen=True, slots=True)
class TalkerOptions:
    """0 leaves a choice to the model. family: whose options they are, for humans. context: rows of a conversation and frames of its speech
    together."""

    family: ClassVar[str]

    context: int = 0

    @classmethod
    def from_settings(cls, options: Mapping[str, Any]) -> Self:
        """Raises LoadError."""
        of = f"the talker of {cls.family}"
        return not_negative(cls(**checked_options(options, cls(), of)), of)
