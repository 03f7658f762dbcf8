"""The options that only models of this family have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omnistage.models.common.encoders import options as encoders
from omnistage.models.common.speech import options as speech
from omnistage.models.errors import LoadError
from omnistage.models.options import checked_options, not_negative

FAMILY = "qwen3_omni"
CODE2WAV = f"the code2wav of {FAMILY}"


class ThinkerOptions(encoders.ThinkerOptions):
    """See there."""

    __slots__ = ()
    family = FAMILY


class TalkerOptions(speech.TalkerOptions):
    """See there."""

    __slots__ = ()
    family = FAMILY


@dataclass(frozen=True, slots=True)
class Code2WavOptions:
    """workers: threads that compute side by side, each of which may have `threads` threads of torch's; 0: as many as there are cores, but
    few."""

    workers: int = 0

    @classmethod
    def from_settings(cls, options: Mapping[str, Any]) -> Code2WavOptions:
        """Raises LoadError."""
        made = not_negative(cls(**checked_options(options, cls(), CODE2WAV)), CODE2WAV)
        if made.workers > speech.MOST_WORKERS:
            raise LoadError(f"option workers of {CODE2WAV} is {made.workers}; {speech.MOST_WORKERS} is the most")
        return made
