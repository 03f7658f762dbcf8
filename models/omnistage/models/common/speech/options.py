"""The options of a Talker that speaks the rows of a Thinker, and of the Code2Wav after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from omnistage.models.errors import LoadError
from omnistage.models.options import not_negative, validate_options


@dataclass(frozen=True, slots=True)
class TalkerOptions:
    """Options of a Talker; 0 leaves a choice to the model. family: name of the family, for humans. context: largest number of rows of a
    conversation and frames of its speech together."""

    family: ClassVar[str]

    context: int = 0

    @classmethod
    def from_settings(cls, options: Mapping[str, Any]) -> Self:
        """The options, from the settings of a server. Raises LoadError."""
        of = f"the talker of {cls.family}"
        return not_negative(cls(**validate_options(options, cls(), of)), of)


@dataclass(frozen=True, slots=True)
class Code2WavOptions:
    """Options of a Code2Wav; 0 leaves a choice to the model. family: name of the family, for humans. most: name of an option -> its largest
    value. workers: number of threads that compute at the same time, each with `threads` torch threads; 0: as many as the cores allow, up to
    a few."""

    family: ClassVar[str]
    most: ClassVar[Mapping[str, int]] = {"workers": 64}

    workers: int = 0

    @classmethod
    def from_settings(cls, options: Mapping[str, Any]) -> Self:
        """The options, from the settings of a server. Raises LoadError."""
        of = f"the code2wav of {cls.family}"
        result = not_negative(cls(**validate_options(options, cls(), of)), of)
        for name, max_value in cls.most.items():
            if getattr(result, name) > max_value:
                raise LoadError(f"option {name} of {of} is {getattr(result, name)}; {max_value} is the most")
        return result
