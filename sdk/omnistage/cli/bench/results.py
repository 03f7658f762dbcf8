"""The results of a benchmark: the figures of each level, with objectives also the answers that kept all limits, printed as blocks and a
table for people, and as one object for programs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import typer
from rich.markup import escape
from rich.table import Table

from omnistage.cli.bench.level import Closed, Failure, Level, Measured, Open, Sample
from omnistage.cli.bench.prompts import Questions
from omnistage.cli.console import Console
from omnistage.client.events import CONTINUITY_LIMIT_S

FIGURES = (
    *("ttft_s", "tpot_s", "itl_s", "e2e_s", "audio_ttfp_s", "ttfa_s", "rtf", "rtf_generation", "underrun_s", "starved_s", "queued_s"),
    *("tokens", "audio_s", "late_s"),
)
"""The figures that have a distribution, in the order in which they are shown."""

UNSCALED = ("rtf", "rtf_generation", "tokens", "audio_s")
"""The figures that are shown in their own unit. All others are seconds, and are shown in milliseconds."""

RATES = {
    "request_throughput": ("req/s", "{} requests/s"),
    "token_throughput": ("tok/s", "{} tokens/s"),
    "audio_throughput": ("audio s/s", "audio {} s/s"),
    "step_throughput": ("steps/s", "{} steps/s"),
    "request_goodput": ("goodput", "goodput {} requests/s"),
}
"""The column of each rate in the table of all levels, and its text in the block of one level."""

PERCENTILES = {
    "ttft ms": ("ttft_s", "median"),
    "ttft p99": ("ttft_s", "p99"),
    "ttfa ms": ("ttfa_s", "median"),
    "e2e ms": ("e2e_s", "median"),
    "e2e p99": ("e2e_s", "p99"),
    "rtf": ("rtf", "median"),
}
"""The figure, and its percentile, of other columns in that table."""

COLUMNS = ("load", "failed", "req/s", "tok/s", "audio s/s", "steps/s", *PERCENTILES, "goodput")

BUSY = 0.8
"""Share of one core. A client that uses more of it may measure late."""

LATE_S = 0.05
"""If half of the requests began later than this, the arrivals were not those that were asked for."""

DROPPED = ("e2e p99", "ttft p99", "audio s/s", "tok/s")
"""Columns of the table of all levels that a narrow terminal leaves out, in this order."""

TOTALS = ("failovers", "tokens", "audio_s", "steps", "pictures")
"""The figures of an answer that are added up over a level."""

LIMITED = {name.removesuffix("_s"): name for name in FIGURES if name not in ("itl_s", "queued_s", "tokens", "audio_s", "late_s")}
"""By the name that is typed with --slo: the figure that it limits."""


def read_limits(text: str) -> dict[str, float]:
    """The limits in a text such as `ttft=0.5,rtf=0.5`: by the typed name of a figure, its largest value in a good answer, in seconds; for
    rtf a ratio. Raises BadParameter."""
    limits: dict[str, float] = {}
    for one in text.split(","):
        name, equals, value = (part.strip() for part in one.partition("="))
        if not equals or name not in LIMITED:
            raise typer.BadParameter(f"--slo {text}: {one.strip()!r} is no limit; give NAME=LIMIT, NAME one of {', '.join(LIMITED)}")
        if name in limits:
            raise typer.BadParameter(f"--slo {text}: {name} is there twice; give it once")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = math.nan  # It is refused here, as it is not above 0.
        if not 0 < limits[name] < math.inf:
            unit = "" if name.startswith("rtf") else " of seconds"
            raise typer.BadParameter(f"--slo {name}={value}: give a number{unit} above 0")
    return limits


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
    def of(cls, values: Sequence[float]) -> Distribution:
        """The summary of these values, one at least."""
        return cls(len(values), float(np.mean(values)), *map(float, np.percentile(values, (50, 90, 99, 100))))


class Summary:
    """The figures of a level, as docs/bench.md explains them. offered = completed + failed + interrupted + not_started.

    totals: sums over the answers, by the names of TOTALS. rates: amounts for each second of wall_s, by the names of RATES; request_goodput
    counts the answers within all limits, and is None without limits. continuous: share of the answers with sound that a listener hears
    without a gap; None: none has sound. client_cpu: processor time of this process divided by wall time. errors: the failures of each kind,
    of which only the first has its message. figures: by name; a figure that no answer has is left out. requests: by number.
    """

    def __init__(self, level: Level, limits: Mapping[str, float] | None) -> None:
        """level: has been measured. limits: those that a good answer keeps, as of `read_limits`."""
        answers = [sample.outcome for sample in level.samples if isinstance(sample.outcome, Measured)]
        gaps_s = [gap_s for answer in answers if (gap_s := answer.figures["underrun_s"]) is not None]
        self.load = level.load
        self.wall_s = level.wall_s
        self.offered = level.offered
        self.completed = len(answers)
        self.failed = len(level.samples) - len(answers)
        self.interrupted = level.offered - level.not_started - len(level.samples)
        self.not_started = level.not_started
        self.totals = {name: sum(answer.figures[name] or 0 for answer in answers) for name in TOTALS}
        amounts = {
            "request_throughput": len(answers),
            "token_throughput": self.totals["tokens"],
            "audio_throughput": self.totals["audio_s"],
            "step_throughput": self.totals["steps"],
            "request_goodput": None if limits is None else sum(_is_within(answer, limits) for answer in answers),
        }
        seconds = level.wall_s or 1.0  # A level that was interrupted at once has no answer, and no rate.
        self.rates = {name: None if amount is None else amount / seconds for name, amount in amounts.items()}
        self.continuous = float(np.less_equal(gaps_s, CONTINUITY_LIMIT_S).mean()) if gaps_s else None
        self.client_cpu = level.client_cpu_s / seconds
        self.errors = _errors(level.samples)
        self.figures = _distributions(level.samples, answers)
        self.requests = sorted(level.samples, key=lambda sample: sample.number)

    def as_object(self, questions: Questions) -> dict[str, Any]:
        """The object of this level, with the keys of docs/bench.md. Figures without a value are left out, or null."""
        requests = [_request_object(sample, questions.seed_of(sample.number)) for sample in self.requests]
        load = {"loop": self.load.loop, **asdict(self.load)}
        if load.get("arrivals") != "burst":
            load.pop("burst", None)
        record = {**vars(self), **self.totals, **self.rates, "load": load}
        return {name: value for name, value in record.items() if name not in ("totals", "rates", "requests")} | {"requests": requests}


def _is_within(answer: Measured, limits: Mapping[str, float]) -> bool:
    """Whether an answer is within all limits; False also if it lacks a figure that has one."""
    values = {name: answer.figures[LIMITED[name]] for name in limits}
    return all(value is not None and value <= limits[name] for name, value in values.items())


def _errors(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """The failures by kind, the most frequent kind first, each with its number and with the message and hint of its first failure."""
    failures = [sample.outcome for sample in samples if isinstance(sample.outcome, Failure)]
    counts = Counter((failure.error, failure.reason) for failure in failures)
    # Reversed, so that the first failure of each kind stays.
    first = {(failure.error, failure.reason): failure for failure in reversed(failures)}
    return [{"count": count, **first[kind].description} for kind, count in counts.most_common()]


def _distributions(samples: Sequence[Sample], answers: Sequence[Measured]) -> dict[str, Distribution]:
    """The distribution of each figure that has a value, in the order of FIGURES."""
    values = {name: [answer.figures.get(name) for answer in answers] for name in FIGURES}
    for name in ("tokens", "audio_s"):  # An answer without text, or without sound, is not one with 0 of it.
        values[name] = [amount or None for amount in values[name]]
    values["itl_s"] = [gap_s for answer in answers for gap_s in answer.itl_s]
    values["late_s"] = [sample.begun_s - sample.due_s for sample in samples]
    measured = {name: [value for value in column if value is not None] for name, column in values.items()}
    return {name: Distribution.of(numbers) for name, numbers in measured.items() if numbers}


def _request_object(sample: Sample, seed: int) -> dict[str, Any]:
    """The object of one request. It has only the number of gaps between pieces of text, because the figures of the level sum the gaps
    up."""
    times = {"number": sample.number, "seed": seed, "due_s": sample.due_s, "begun_s": sample.begun_s, "ended_s": sample.ended_s}
    outcome = sample.outcome
    if isinstance(outcome, Failure):
        return times | {"outcome": "failed", **outcome.description}
    return times | {"outcome": "completed", "finish_reason": outcome.finish_reason, "itl_count": len(outcome.itl_s), **outcome.figures}


class BenchScreen:
    """Prints on stdout, as wide as the terminal; without a terminal 100 columns wide. is_quiet: print nothing."""

    def __init__(self, *, is_quiet: bool) -> None:
        console = Console(highlight=False, quiet=is_quiet)
        self._console = console if console.is_terminal else Console(width=100, highlight=False, quiet=is_quiet)

    def line(self, text: str, style: str = "") -> None:
        """Print a line."""
        self._console.print(escape(text), style=style)

    def level(self, summary: Summary) -> None:
        """Print the block of one level."""
        self._console.print()
        self.line(str(summary.load), "bold")
        self.line(" · ".join(_counts(summary)))
        self.line(" · ".join(_throughputs(summary)))
        if summary.completed:
            self._console.print(_figures(summary))
        for error in summary.errors:
            reason = f" ({error['reason']})" if error["reason"] else ""
            self.line(f"{error['count']} × {error['error']}{reason}: {error['message']}", "red")
        for warning in warnings(summary):
            self.line(f"note: {warning}", "yellow")

    def levels(self, levels: Sequence[Summary]) -> None:
        """Print the table of all levels, with as many columns as fit, none of them cut."""
        self._console.print()
        rows = [_row(level) for level in levels]
        columns = [name for name in COLUMNS if any(name in row for row in rows)]
        for dropped in ("", *DROPPED):  # The first try has all columns.
            columns = [name for name in columns if name != dropped]
            table = _table(columns)
            for row in rows:
                table.add_row(*(row.get(name, "") for name in columns))
            if self._console.measure(table, options=self._console.options.update(width=1000)).maximum <= self._console.width:
                break
        self._console.print(table)


def warnings(summary: Summary) -> list[str]:
    """Reasons why the figures of a level may mislead."""
    lines = []
    if summary.client_cpu >= BUSY:
        lines.append(f"this client computed for {summary.client_cpu:.0%} of one core; part of every time is its own")
    delay_s = summary.figures.get("late_s")
    if delay_s is not None and delay_s.median >= LATE_S:
        lines.append(f"half of the requests began more than {delay_s.median * 1e3:.0f} ms after their time")
    if summary.not_started:
        lines.append(f"{summary.not_started} requests were not started: as many as may be were open (--max-open)")
    return lines


def _counts(summary: Summary) -> list[str]:
    """How the requests of a level ended, in words."""
    counts = vars(summary) | summary.totals
    completed = f"{summary.completed} of {summary.offered} completed in {summary.wall_s:.1f} s"
    names = ("failed", "interrupted", "not_started", "failovers")
    return [completed, *(f"{counts[name]} {name.replace('_', ' ')}" for name in names if counts[name])]


def _rates(summary: Summary) -> dict[str, str]:
    """The rates of a level as texts, by name; without those of output that it has none of."""
    return {name: number(rate) for name, rate in summary.rates.items() if rate or (name.startswith("request") and rate is not None)}


def _throughputs(summary: Summary) -> list[str]:
    """Amounts a second, and shares of the answers, in words."""
    texts = {name: RATES[name][1].format(rate) for name, rate in _rates(summary).items()}
    goodput = texts.pop("request_goodput", "")
    continuity = "" if summary.continuous is None else f"{summary.continuous:.0%} of answers heard without a gap"
    return [text for text in (*texts.values(), continuity, goodput) if text]


def _table(columns: Sequence[str]) -> Table:
    """An empty table whose first column has names, and the others numbers."""
    table = Table(box=None, header_style="dim", pad_edge=False)
    for place, name in enumerate(columns):
        table.add_column(name, justify="right" if place else "left", no_wrap=True)
    return table


def _figures(summary: Summary) -> Table:
    """The table of a level: a row for each figure."""
    table = _table(("", "mean", "median", "p90", "p99", "max"))
    for name, values in summary.figures.items():
        if name == "late_s" and isinstance(summary.load, Closed):
            continue  # In a closed loop no request has a time at which it is due.
        label = name.replace("_", " ") if name in UNSCALED else f"{name.removesuffix('_s')} ms"
        row = (values.mean, values.median, values.p90, values.p99, values.max)
        table.add_row(label, *(_shown(name, value) for value in row))
    return table


def _row(level: Summary) -> dict[str, str]:
    """The cells of a level in the table of all levels, by column; without those of figures that no answer has."""
    failed = level.failed + level.not_started
    load = f"{level.load.rate:g}/s" if isinstance(level.load, Open) else str(level.load.concurrency)
    row = {"load": load} | ({"failed": str(failed)} if failed else {})
    row |= {RATES[name][0]: text for name, text in _rates(level).items()}
    for column, (name, percentile) in PERCENTILES.items():
        if name in level.figures:
            row[column] = _shown(name, getattr(level.figures[name], percentile))
    return row


def _shown(name: str, value: float) -> str:
    """A value of the figure of this name, as a cell."""
    return number(value if name in UNSCALED else 1e3 * value)


def number(value: float) -> str:
    """A number with three digits, or more if it is larger: 0, 0.012, 1.23, 12.3, 123, 12345."""
    # From each of these bounds on, the rounded number has one digit more before the point, so it gets one less behind it.
    bounds_reached = sum(abs(value) >= bound for bound in (0.9995, 9.995, 99.95))
    digits = 3 - bounds_reached if value else 0
    return f"{value:.{digits}f}"
