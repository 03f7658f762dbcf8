"""The options that only models of this family have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omnistage.models.common.encoders import options as encoders
from omnistage.models.errors import LoadError
from omnistage.models.options import checked_options, not_negative

FAMILY = "qwen3_omni"
TALKER, CODE2WAV = f"the talker of {FAMILY}", f"the code2wav of {FAMILY}"

MOST_WORKERS = 64


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
        return not_negative(cls(**checked_options(options, cls(), TALKER)), TALKER)


@dataclass(frozen=True, slots=True)
class Code2WavOptions:
    """workers: threads that compute side by side, each of which may have `threads` threads of torch's; 0: as many as there are cores, but
    few."""

    workers: int = 0

    @classmethod
    def from_settings(cls, options: Mapping[str, Any]) -> Code2WavOptions:
        """Raises LoadError."""
        made = not_negative(cls(**checked_options(options, cls(), CODE2WAV)), CODE2WAV)
        if made.workers > MOST_WORKERS:
            raise LoadError(f"option workers of {CODE2WAV} is {made.workers}; {MOST_WORKERS} is the most")
        return made
