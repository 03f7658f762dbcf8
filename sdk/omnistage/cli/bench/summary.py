"""Computes the figures of a level: how many requests there were, how they ended, rates, and the distribution of each figure. With
objectives it counts the answers that kept all limits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from omnistage.cli.bench.level import Failure, Level, Load, Measured, Sample

OBJECTIVE_KINDS = {
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
        figures = (getattr(answer, OBJECTIVE_KINDS[name]) for name in self.limits)
        return all(value is not None and value <= limit for value, limit in zip(figures, self.limits.values(), strict=True))

    @classmethod
    def parse(cls, text: str) -> Objectives:
        """Read a text such as `ttft=0.5,rtf=0.5`. Raises ValueError with a text for the user."""
        limits: dict[str, float] = {}
        for one in text.split(","):
            name, equals, value = (part.strip() for part in one.partition("="))
            if not equals or name not in OBJECTIVE_KINDS:
                raise ValueError(f"--slo {text}: {one.strip()!r} is no limit; give NAME=LIMIT, NAME one of {', '.join(OBJECTIVE_KINDS)}")
            if name in limits:
                raise ValueError(f"--slo {text}: {name} is there twice; give it once")
            limits[name] = _limit(name, value)
        return cls(limits)


def _limit(name: str, value: str) -> float:
    """The limit of a figure, as typed. Raises ValueError with a text for the user."""
    try:
        limit = float(value)
    except ValueError:
        limit = math.nan  # It is refused below, as it is not above 0.
    if not 0 < limit < math.inf:
        unit = "" if name.startswith("rtf") else " of seconds"
        raise ValueError(f"--slo {name}={value}: give a number{unit} above 0")
    return limit


@dataclass(frozen=True, slots=True)
class Distribution:
    """A summary of many values of one figure, in its unit. Percentiles are interpolated linearly between the two nearest values."""

    count: int
    mean: float
    median: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution | None:
        """The summary of these values; None if there are none."""
        if not len(values):
            return None
        array = np.asarray(values, np.float64)
        median, p90, p99 = np.percentile(array, (50, 90, 99), method="linear")
        return cls(len(array), float(array.mean()), float(median), float(p90), float(p99), float(array.max()))


@dataclass(frozen=True, slots=True)
class Error:
    """All failures of one kind. count: how many. message, hint: of the first of them."""

    error: str
    reason: str
    count: int
    message: str
    hint: str


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a level. Its counts add up: offered = completed + failed + interrupted + not_started.

    interrupted: requests that were running when a signal ended the level. client_cpu: processor time of this process divided by wall time.
    continuous: share of the answers with sound that a listener hears without a gap. request_goodput: answers a second that met all
    objectives. figures: by name; a figure that no answer has is left out.
    """

    load: Load
    samples: Sequence[Sample]
    wall_s: float
    client_cpu: float
    offered: int
    interrupted: int
    not_started: int
    errors: Sequence[Error]
    figures: Mapping[str, Distribution]
    request_goodput: float | None

    @classmethod
    def of(cls, level: Level, objectives: Objectives | None) -> Summary:
        """The figures of a level that has been measured. objectives: for `request_goodput`, which is None without them."""
        answers = _answers(level.samples)
        wall_s = max(level.wall_s, 1e-9)  # A level without a request lasts 0 s, and 0 cannot be a divisor.
        goodput = None if objectives is None else sum(map(objectives.are_met_by, answers)) / wall_s
        return cls(
            load=level.load,
            samples=tuple(sorted(level.samples, key=lambda sample: sample.number)),
            wall_s=level.wall_s,
            client_cpu=level.client_cpu_s / wall_s,
            offered=level.offered,
            interrupted=level.started - len(level.samples),
            not_started=level.not_started,
            errors=_errors(level.samples),
            figures=_distributions(level.samples, answers),
            request_goodput=goodput,
        )

    @property
    def answers(self) -> list[Measured]:
        return _answers(self.samples)

    @property
    def completed(self) -> int:
        return len(self.answers)

    @property
    def failed(self) -> int:
        return len(self.samples) - self.completed

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)

    @property
    def audio_s(self) -> float:
        return sum(answer.audio_s for answer in self.answers)

    @property
    def steps(self) -> int:
        return sum(answer.steps for answer in self.answers)

    @property
    def pictures(self) -> int:
        return sum(answer.pictures for answer in self.answers)

    @property
    def failovers(self) -> int:
        return sum(answer.failovers for answer in self.answers)

    @property
    def request_throughput(self) -> float:
        return self.a_second(self.completed)

    @property
    def token_throughput(self) -> float:
        return self.a_second(self.tokens)

    @property
    def audio_throughput(self) -> float:
        """Seconds of sound that were made in a second."""
        return self.a_second(self.audio_s)

    @property
    def step_throughput(self) -> float:
        return self.a_second(self.steps)

    @property
    def continuous(self) -> float | None:
        flags = [answer.is_continuous for answer in self.answers if answer.is_continuous is not None]
        return sum(flags) / len(flags) if flags else None

    def a_second(self, amount: float) -> float:
        """An amount per second: divided by the wall time of the level."""
        return amount / self.wall_s if self.wall_s else 0.0


def _answers(samples: Sequence[Sample]) -> list[Measured]:
    return [sample.outcome for sample in samples if isinstance(sample.outcome, Measured)]


def _errors(samples: Sequence[Sample]) -> list[Error]:
    """The failures by kind, the most frequent kind first."""
    failures = [sample.outcome for sample in samples if isinstance(sample.outcome, Failure)]
    counts = Counter((failure.error, failure.reason) for failure in failures)
    # Reversed, so that the first failure of each kind stays.
    first = {(failure.error, failure.reason): failure for failure in reversed(failures)}
    return [Error(*kind, count, first[kind].message, first[kind].hint) for kind, count in counts.most_common()]


OF_ANSWERS: Mapping[str, Callable[[Measured], float | None]] = {
    "ttft_s": lambda answer: answer.ttft_s,
    "tpot_s": lambda answer: answer.tpot_s,
    "e2e_s": lambda answer: answer.e2e_s,
    "audio_ttfp_s": lambda answer: answer.audio_ttfp_s,
    "ttfa_s": lambda answer: answer.ttfa_s,
    "rtf": lambda answer: answer.rtf,
    "rtf_generation": lambda answer: answer.rtf_generation,
    "underrun_s": lambda answer: answer.underrun_s,
    "starved_s": lambda answer: answer.starved_s,
    "queued_s": lambda answer: answer.queued_s,
    "tokens": lambda answer: answer.tokens or None,
    "audio_s": lambda answer: answer.audio_s or None,
}
"""By the name of a figure: its value for one answer, which may be None."""


def _distributions(samples: Sequence[Sample], answers: Sequence[Measured]) -> dict[str, Distribution]:
    """The distribution of each figure that has a value, in the order of FIGURES."""
    values: dict[str, list[float]] = {}
    for name, figure_of in OF_ANSWERS.items():
        values[name] = [figure for figure in map(figure_of, answers) if figure is not None]
    values["itl_s"] = [gap_s for answer in answers for gap_s in answer.itl_s]
    values["late_s"] = [sample.late_s for sample in samples]
    distributions = {name: Distribution.of(values[name]) for name in FIGURES}
    return {name: distribution for name, distribution in distributions.items() if distribution is not None}


FIGURES = (
    *("ttft_s", "tpot_s", "itl_s", "e2e_s", "audio_ttfp_s", "ttfa_s", "rtf", "rtf_generation", "underrun_s", "starved_s", "queued_s"),
    *("tokens", "audio_s", "late_s"),
)
"""The order in which the figures are shown."""
