"""The family Qwen3-Omni, as data: its models, and the options that only they have. No torch."""

from __future__ import annotations

from omnistage.models import options

FAMILY = "qwen3_omni"


class ThinkerOptions(options.ThinkerOptions):
    """See the common ThinkerOptions."""

    __slots__ = ()
    family = FAMILY


class TalkerOptions(options.TalkerOptions):
    """See the common TalkerOptions."""

    __slots__ = ()
    family = FAMILY


class Code2WavOptions(options.Code2WavOptions):
    """See the common Code2WavOptions."""

    __slots__ = ()
    family = FAMILY
