"""The options that only models of this family have."""

from __future__ import annotations

from omnistage.models.common.encoders import options as encoders
from omnistage.models.common.speech import options as speech

FAMILY = "qwen3_omni"


class ThinkerOptions(encoders.ThinkerOptions):
    """See there."""

    __slots__ = ()
    family = FAMILY


class TalkerOptions(speech.TalkerOptions):
    """See there."""

    __slots__ = ()
    family = FAMILY


class Code2WavOptions(speech.Code2WavOptions):
    """See there."""

    __slots__ = ()
    family = FAMILY
