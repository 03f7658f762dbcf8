"""The options that only models of this family have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from omnistage.models.errors import LoadError
from omnistage.models.options import checked_options

Made = TypeVar("Made", "ThinkerOptions", "TalkerOptions")


@dataclass(frozen=True, slots=True)
class ThinkerOptions:
    """0 leaves a choice to the model.

    context: tokens of a conversation and its answer. medium_rows: tokens that a picture or film becomes at most; a larger one is made
    smaller. feature_cache_bytes: of what was computed of media. decoders: processes that decode media.
    """

    context: int = 0
    medium_rows: int = 0
    feature_cache_bytes: int = 0
    decoders: int = 0

    @classmethod
    def from_settings(cls, options: Mapping[str, Any]) -> ThinkerOptions:
        """Raises LoadError."""
        return _not_negative(cls(**checked_options(options, cls(), "the thinker of qwen2_5_omni")), "thinker")


@dataclass(frozen=True, slots=True)
class TalkerOptions:
    """0 leaves a choice to the model. context: rows of a conversation and frames of its speech together."""

    context: int = 0

    @classmethod
    def from_settings(cls, options: Mapping[str, Any]) -> TalkerOptions:
        """Raises LoadError."""
        return _not_negative(cls(**checked_options(options, cls(), "the talker of qwen2_5_omni")), "talker")


def _not_negative(made: Made, kind: str) -> Made:
    for each in fields(made):
        if getattr(made, each.name) < 0:
            raise LoadError(f"option {each.name} of the {kind} of qwen2_5_omni is {getattr(made, each.name)}; 0 leaves it to the model")
    return made
