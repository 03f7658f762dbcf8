"""The options that only models of this family have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from omnistage.models.errors import LoadError
from omnistage.models.options import checked_options

Made = TypeVar("Made", "ThinkerOptions", "TalkerOptions", "Code2WavOptions")

SOLVERS = ("rk4", "midpoint", "euler")
"""The first is the one that the model was published with."""

MOST_STEPS = 100
MOST_WORKERS = 64
MOST_AHEAD = 36
"""Blocks: with the published solver and steps, the slope of a block depends on nothing behind them."""


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
        made = _not_negative(cls(**checked_options(options, cls(), "the code2wav of qwen2_5_omni")), "code2wav")
        if made.solver not in SOLVERS:
            raise LoadError(f"option solver of the code2wav of qwen2_5_omni is {made.solver!r}; there are {', '.join(SOLVERS)}")
        for name, most in (("steps", MOST_STEPS), ("lookahead", MOST_AHEAD), ("workers", MOST_WORKERS)):
            if getattr(made, name) > most:
                raise LoadError(f"option {name} of the code2wav of qwen2_5_omni is {getattr(made, name)}; {most} is the most")
        return made


def _not_negative(made: Made, kind: str) -> Made:
    for each in fields(made):
        value = getattr(made, each.name)
        if not isinstance(value, str) and value < 0:
            raise LoadError(f"option {each.name} of the {kind} of qwen2_5_omni is {value}; 0 leaves it to the model")
    return made
