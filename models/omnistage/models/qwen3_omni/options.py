"""Options that only models of this family have."""

from __future__ import annotations

from omnistage.models import options as encoders
from omnistage.models import options as speech

FAMILY = "qwen3_omni"


class ThinkerOptions(encoders.ThinkerOptions):
    """See the common ThinkerOptions."""

    __slots__ = ()
    family = FAMILY


class TalkerOptions(speech.TalkerOptions):
    """See the common TalkerOptions."""

    __slots__ = ()
    family = FAMILY


class Code2WavOptions(speech.Code2WavOptions):
    """See the common Code2WavOptions."""

    __slots__ = ()
    family = FAMILY
