"""The options that only models of this family have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omnistage.models.common.encoders import options as encoders
from omnistage.models.errors import LoadError
from omnistage.models.options import checked_options

FAMILY = "qwen3_omni"


class ThinkerOptions(encoders.ThinkerOptions):
    """See there."""

    __slots__ = ()
    family = FAMILY


@dataclass(frozen=True, slots=True)
class TalkerOptions:
    """0 leaves a choice to the model. context: rows of a conversation and frames of its speech together."""

    context: int = 0

    @classmethod
    def from_settings(cls, options: Mapping[str, Any]) -> TalkerOptions:
        """Raises LoadError."""
        made = cls(**checked_options(options, cls(), "the talker of qwen3_omni"))
        if made.context < 0:
            raise LoadError(f"option context of the talker of qwen3_omni is {made.context}; 0 leaves it to the model")
        return made
