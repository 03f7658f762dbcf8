"""The limits that an answer must keep to count as good."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from omnistage.cli.bench.sample import Measured

KINDS = {
    "ttft": "ttft_s",
    "tpot": "tpot_s",
    "e2e": "e2e_s",
    "audio_ttfp": "audio_ttfp_s",
    "ttfa": "ttfa_s",
    "rtf": "rtf",
    "rtf_generation": "rtf_generation",
    "underrun": "underrun_s",
    "starved": "starved_s",
}
"""The names that can be typed, and the figure that each one bounds."""


@dataclass(frozen=True, slots=True)
class Objectives:
    """Limits on figures of an answer. limits: by the typed name of a figure, its largest allowed value, in seconds; for rtf a ratio."""

    limits: Mapping[str, float]

    def __str__(self) -> str:
        return ", ".join(f"{name} <= {limit:g}" for name, limit in self.limits.items())

    def are_met_by(self, answer: Measured) -> bool:
        """Whether an answer keeps to all limits; False also if it lacks a figure that has a limit."""
        figures = (getattr(answer, KINDS[name]) for name in self.limits)
        return all(value is not None and value <= limit for value, limit in zip(figures, self.limits.values(), strict=True))

    @classmethod
    def parse(cls, text: str) -> Objectives:
        """Read a text such as `ttft=0.5,rtf=0.5`. Raises ValueError with a text for the user."""
        limits: dict[str, float] = {}
        for one in text.split(","):
            name, equals, value = (part.strip() for part in one.partition("="))
            if not equals or name not in KINDS:
                raise ValueError(f"--slo {text}: {one.strip()!r} is no limit; give NAME=LIMIT, NAME one of {', '.join(KINDS)}")
            if name in limits:
                raise ValueError(f"--slo {text}: {name} is there twice; give it once")
            limits[name] = _limit(name, value)
        return cls(limits)


def _limit(name: str, value: str) -> float:
    """The limit of a figure, as typed. Raises ValueError with a text for the user."""
    try:
        limit = float(value)
    except ValueError:
        limit = math.nan
    if not 0 < limit < math.inf:
        unit = "" if name.startswith("rtf") else " of seconds"
        raise ValueError(f"--slo {name}={value}: give a number{unit} above 0")
    return limit
