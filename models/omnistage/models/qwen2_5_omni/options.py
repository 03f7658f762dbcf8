"""The options that only models of this family have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omnistage.models.common.encoders import options as encoders
from omnistage.models.common.speech import options as speech
from omnistage.models.errors import LoadError
from omnistage.models.options import checked_options, not_negative

FAMILY = "qwen2_5_omni"
CODE2WAV = f"the code2wav of {FAMILY}"
SOLVERS = ("rk4", "midpoint", "euler")
"""The first is the one that the model was published with."""

MOST_STEPS = 100
MOST_AHEAD = 36
"""Blocks: with the published solver and steps, the slope of a block depends on nothing behind them."""


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
    """solver: of the flow: one of SOLVERS. steps: of it, one less than `num_steps` of Transformers; 0 leaves it to the model. lookahead:
    blocks of 12 codes that a window looks ahead; 0 leaves it to the profile of a request. workers: threads that compute side by side, each
    of which may have `threads` threads of torch's; 0: as many as there are cores, but few."""

    solver: str = SOLVERS[0]
    steps: int = 0
    lookahead: int = 0
    workers: int = 0

    @classmethod
    def from_settings(cls, options: Mapping[str, Any]) -> Code2WavOptions:
        """Raises LoadError."""
        made = not_negative(cls(**checked_options(options, cls(), CODE2WAV)), CODE2WAV)
        if made.solver not in SOLVERS:
            raise LoadError(f"option solver of {CODE2WAV} is {made.solver!r}; there are {', '.join(SOLVERS)}")
        for name, most in (("steps", MOST_STEPS), ("lookahead", MOST_AHEAD), ("workers", speech.MOST_WORKERS)):
            if getattr(made, name) > most:
                raise LoadError(f"option {name} of {CODE2WAV} is {getattr(made, name)}; {most} is the most")
        return made
