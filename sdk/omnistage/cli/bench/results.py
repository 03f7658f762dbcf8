"""Tells the result of a benchmark: prints blocks and a table for people, makes one JSON object for programs, and draws a picture: with
several levels how figures change with the load, with one level how their values are distributed."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from omnistage.cli.bench.level import Closed, Load, Measured, Sample
from omnistage.cli.bench.run import Result
from omnistage.cli.bench.summary import OF_ANSWERS, Summary
from omnistage.cli.console import Console
from omnistage.client.version import version

if TYPE_CHECKING:
    from matplotlib.axes import Axes


LABELS = {"rtf": "rtf", "rtf_generation": "rtf generation", "audio_s": "audio s", "tokens": "tokens"}
"""Labels of the figures that are not shown in milliseconds. All other figures are, with their name as the label."""

BUSY = 0.8
"""Share of one core. A client that uses more of it may measure late."""

LATE_S = 0.05
"""If half of the requests began later than this, the arrivals were not those that were asked for."""

DROPPED = ("e2e p99", "ttft p99", "audio s/s", "tok/s")
"""Columns of the table of all levels that a narrow terminal leaves out, in this order."""


class BenchScreen:
    """Prints on stdout, as wide as the terminal; without a terminal 100 columns wide."""

    def __init__(self) -> None:
        console = Console(highlight=False)
        self._console = console if console.is_terminal else Console(width=100, highlight=False)

    def begin(self, result: Result) -> None:
        """Print which router and pipeline is asked, and how."""
        plan = result.plan
        pipeline = plan.questions.options.get("pipeline", "")
        models = [stage.model for stage in result.stages if stage.pipeline == pipeline or not pipeline]
        parts = [f"asking {plan.target.address}", pipeline, ", ".join(dict.fromkeys(models)), plan.questions.prompts.description]
        if plan.questions.tokens is not None:
            parts.append(f"answers of {plan.questions.tokens} tokens")
        self._line(" · ".join(filter(None, parts)), "dim")

    def level(self, summary: Summary) -> None:
        """Print the block of one level."""
        self._console.print()
        self._line(str(summary.load), "bold")
        self._line(" · ".join(_counts(summary)))
        self._line(" · ".join(_throughputs(summary)))
        if summary.completed:
            self._console.print(_figures(summary))
        for error in summary.errors:
            reason = f" ({error.reason})" if error.reason else ""
            self._line(f"{error.count} × {error.error}{reason}: {error.message}", "red")
        for warning in warnings(summary):
            self._line(f"note: {warning}", "yellow")

    def end(self, result: Result) -> None:
        """Print the table of all levels, if there are several."""
        if result.interrupted_by:
            self._console.print()
            self._line("interrupted: this is what was measured by then", "yellow")
        if len(result.levels) > 1:
            self._console.print()
            self._console.print(_fit_levels_table(result.levels, self._console))

    def _line(self, text: str, style: str = "") -> None:
        self._console.print(escape(text), style=style)


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
    parts = [f"{summary.completed} of {summary.offered} completed in {summary.wall_s:.1f} s"]
    for name in ("failed", "interrupted", "not_started", "failovers"):
        if count := getattr(summary, name):
            parts.append(f"{count} {name.replace('_', ' ')}")
    return parts


def _throughputs(summary: Summary) -> list[str]:
    """Amounts a second, and shares of the answers, in words."""
    parts = [f"{number(summary.request_throughput)} requests/s"]
    if summary.tokens:
        parts.append(f"{number(summary.token_throughput)} tokens/s")
    if summary.audio_s:
        parts.append(f"audio {number(summary.audio_throughput)} s/s")
    if summary.steps:
        parts.append(f"{number(summary.step_throughput)} steps/s")
    if summary.continuous is not None:
        parts.append(f"{summary.continuous:.0%} of answers heard without a gap")
    if summary.request_goodput is not None:
        parts.append(f"goodput {number(summary.request_goodput)} requests/s")
    return parts


def _figures(summary: Summary) -> Table:
    """The table of a level: a row for each figure."""
    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in ("mean", "median", "p90", "p99", "max"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, values in summary.figures.items():
        if name == "late_s" and isinstance(summary.load, Closed):
            continue  # In a closed loop no request has a time at which it is due.
        label, scale = (LABELS[name], 1.0) if name in LABELS else (f"{name.removesuffix('_s')} ms", 1e3)
        row = (values.mean, values.median, values.p90, values.p99, values.max)
        table.add_row(label, *(number(scale * value) for value in row))
    return table


def _fit_levels_table(levels: Sequence[Summary], console: Console) -> Table:
    """The table of all levels with as many columns as fit, none of them cut."""
    unbounded = console.options.update(width=1000)
    rows = [_row(level) for level in levels]
    columns = [name for name in rows[0] if any(row[name] for row in rows)]
    for dropped in ("", *DROPPED):  # The first try has all columns.
        columns = [name for name in columns if name != dropped]
        table = _levels_table(rows, columns)
        if console.measure(table, options=unbounded).maximum <= console.width:
            break
    return table


def _levels_table(rows: Sequence[dict[str, str]], columns: Sequence[str]) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name == "load" else "right", overflow="fold")
    for row in rows:
        table.add_row(*(row[name] for name in columns))
    return table


def _row(level: Summary) -> dict[str, str]:
    """The cells of a level in the table of all levels, by column."""

    def of(name: str, percentile: str, scale: float = 1e3) -> str:
        """A percentile of a figure as text; empty if no answer has the figure."""
        values = level.figures.get(name)
        return "" if values is None else number(scale * getattr(values, percentile))

    good = level.request_goodput
    return {
        "load": level.load.amount,
        "failed": str(level.failed + level.not_started) if level.failed + level.not_started else "",
        "req/s": number(level.request_throughput),
        "tok/s": number(level.token_throughput) if level.tokens else "",
        "audio s/s": number(level.audio_throughput) if level.audio_s else "",
        "steps/s": number(level.step_throughput) if level.steps else "",
        "ttft ms": of("ttft_s", "median"),
        "ttft p99": of("ttft_s", "p99"),
        "ttfa ms": of("ttfa_s", "median"),
        "e2e ms": of("e2e_s", "median"),
        "e2e p99": of("e2e_s", "p99"),
        "rtf": of("rtf", "median", 1.0),
        "goodput": "" if good is None else number(good),
    }


def number(value: float) -> str:
    """A number with three digits, or more if it is larger: 0, 0.012, 1.23, 12.3, 123, 12345."""
    # From each of these bounds on, the rounded number has one digit more before the point, so it gets one less behind it.
    bounds_reached = sum(abs(value) >= bound for bound in (0.9995, 9.995, 99.95))
    digits = 3 - bounds_reached if value else 0
    return f"{value:.{digits}f}"


DIGITS = 6
"""Digits after the point of seconds and shares: microseconds."""


def as_object(result: Result) -> dict[str, Any]:
    """The object, with the keys of docs/bench.md. Figures without a value are left out, or null."""
    plan = result.plan
    questions = plan.questions
    record: dict[str, Any] = {
        "version": version(),
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "client": {"python": platform.python_version(), "cpus": os.cpu_count()},
        "address": plan.target.address,
        "stages": [asdict(stage) for stage in result.stages],
        "task": questions.task,
        "prompts": questions.prompts.description,
        "output_tokens": None if questions.tokens is None else str(questions.tokens),
        "options": dict(questions.options),
        "seed": questions.seed,
        "warmup": plan.warmup,
        "slo": None if plan.objectives is None else dict(plan.objectives.limits),
        "interrupted": bool(result.interrupted_by),
        "levels": [_level(level) for level in result.levels],
    }
    return _round_all(record)  # type: ignore[no-any-return]


def _level(summary: Summary) -> dict[str, Any]:
    """The object of one level."""
    counts = ("offered", "completed", "failed", "interrupted", "not_started", "failovers", "tokens", "audio_s", "steps", "pictures")
    rates = ("request_throughput", "token_throughput", "audio_throughput", "step_throughput", "request_goodput")
    return {
        "load": _load(summary.load),
        "wall_s": summary.wall_s,
        **{name: getattr(summary, name) for name in (*counts, *rates, "continuous", "client_cpu")},
        "errors": [asdict(error) for error in summary.errors],
        "figures": {name: asdict(values) for name, values in summary.figures.items()},
        "requests": [_request(sample) for sample in summary.samples],
    }


def _load(load: Load) -> dict[str, Any]:
    """The object of a load."""
    if isinstance(load, Closed):
        return {"loop": "closed", "concurrency": load.concurrency}
    burst = {"burst": load.burst} if load.process == "burst" else {}
    return {"loop": "open", "arrivals": load.process, "rate": load.rate, **burst, "max_open": load.most_open}


def _request(sample: Sample) -> dict[str, Any]:
    """The object of one request. It has only the number of gaps between pieces of text, because the figures of the level sum the gaps
    up."""
    record: dict[str, Any] = {name: getattr(sample, name) for name in ("number", "seed", "due_s", "begun_s", "ended_s")}
    if isinstance(sample.outcome, Measured):
        record |= {"outcome": "completed", **asdict(sample.outcome)}
        record["itl_count"] = len(record.pop("itl_s"))
    else:
        record |= {"outcome": "failed", "error": sample.outcome.error, "reason": sample.outcome.reason, "message": sample.outcome.message}
    return record


def _round_all(value: Any) -> Any:
    """The same value, with all its numbers rounded to DIGITS."""
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, dict):
        return {name: _round_all(one) for name, one in value.items()}
    return [_round_all(one) for one in value] if isinstance(value, (list, tuple)) else value


KINDS = {".png": "PNG", ".svg": "SVG"}
WIDTH_IN, ROW_IN, TITLE_IN, DPI = 10.0, 3.0, 0.4, 150
INK, FAINT, GRID = "#1d2939", "#667085", "#e4e7ec"
COLOURS = {
    "ttft_s": "#2e90fa",
    "ttfa_s": "#f79009",
    "e2e_s": "#7a5af8",
    "tpot_s": "#12b76a",
    "rtf": "#f79009",
    "rtf_generation": "#12b76a",
}
BAD = "#d92d20"


@dataclass(frozen=True, slots=True)
class Panel:
    """One diagram of the picture. names: the figures in it; empty: requests a second. scale: the figures are multiplied by it to get the
    unit in the title."""

    title: str
    names: tuple[str, ...] = ()
    scale: float = 1e3

    def is_known(self, levels: Sequence[Summary]) -> bool:
        """Whether any level has a value to draw."""
        return not self.names or any(name in level.figures for name in self.names for level in levels)


FIRSTS = Panel("first text and first sound, ms", ("ttft_s", "ttfa_s"))
WHOLE_ANSWER = Panel("whole answer, ms", ("e2e_s",))
RTF = Panel("real-time factor", ("rtf", "rtf_generation"), 1.0)
PANELS = (FIRSTS, WHOLE_ANSWER, Panel("requests a second"), RTF)
PANELS_OF_ONE = (FIRSTS, WHOLE_ANSWER, Panel("time per token, ms", ("tpot_s",)), RTF)


def draw(path: Path, result: Result, kind: str) -> None:
    """Write the picture; as PNG it is 1500 pixels wide. result: with at least one level. kind: png or svg, whatever the path ends in."""
    # Imported here, and without the global pyplot state, because most runs never draw.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    levels = result.levels
    panels = [panel for panel in (PANELS if len(levels) > 1 else PANELS_OF_ONE) if panel.is_known(levels)]
    # Two panels stand in a row. Without any panel there is one place, for a text.
    rows, columns = max(1, (len(panels) + 1) // 2), min(2, max(1, len(panels)))
    figure = Figure(figsize=(WIDTH_IN, TITLE_IN + ROW_IN * rows), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    places = figure.subplots(rows, columns, squeeze=False).flat
    for axes in places[len(panels) :]:
        axes.set_axis_off()
    for axes, panel in zip(places, panels, strict=False):
        axes.set_title(panel.title, fontsize=9.5, color=INK, loc="left")
        if len(levels) == 1:
            _distribution(axes, levels[0], panel)
        elif panel.names:
            _over_load(axes, levels, panel)
        else:
            _throughput(axes, levels)
        _dress(axes)
    if not panels:
        places[0].text(0.5, 0.5, "no request was completed", ha="center", va="center", fontsize=10, color=FAINT)
    height_in = figure.get_figheight()
    # The title stands 0.12 inches from the left and upper edge; places are shares of the figure, whose upper edge is at 1.
    figure.text(0.12 / WIDTH_IN, 1 - 0.12 / height_in, _title(result), va="top", fontsize=10.5, color=INK, parse_math=False)
    figure.tight_layout(rect=(0, 0, 1, 1 - TITLE_IN / height_in))
    figure.savefig(path, format=kind)


def _title(result: Result) -> str:
    """The title: pipeline, load, prompts, and number of answers."""
    questions = result.plan.questions
    pipelines = dict.fromkeys(stage.pipeline for stage in result.stages)
    name = questions.options.get("pipeline") or ", ".join(pipelines)
    load = str(result.levels[0].load) if len(result.levels) == 1 else f"{len(result.levels)} levels of load"
    return f"{name} · {load} · {questions.prompts.description} · {result.completed} answers"


def _over_load(axes: Axes, levels: Sequence[Summary], panel: Panel) -> None:
    """Draw each figure over the levels: its median as a line, and the area from there to the 99th percentile."""
    for name in panel.names:
        values_at = [(place, level.figures[name]) for place, level in enumerate(levels) if name in level.figures]
        if not values_at:
            continue
        places = [place for place, _ in values_at]
        medians = [panel.scale * values.median for _, values in values_at]
        highs = [panel.scale * values.p99 for _, values in values_at]
        axes.plot(places, medians, marker="o", markersize=4, color=COLOURS[name], label=f"{_label(name)} median, to p99")
        axes.fill_between(places, medians, highs, color=COLOURS[name], alpha=0.15, linewidth=0)
    _show_loads(axes, levels)


def _throughput(axes: Axes, levels: Sequence[Summary]) -> None:
    """Draw answers, good answers and failures a second over the levels."""
    places = range(len(levels))
    axes.plot(places, [level.request_throughput for level in levels], marker="o", markersize=4, color=COLOURS["ttft_s"], label="completed")
    if levels[0].request_goodput is not None:
        good = [level.request_goodput or 0.0 for level in levels]
        axes.plot(places, good, marker="o", markersize=4, color=COLOURS["tpot_s"], label="goodput")
    failure_rates = [level.a_second(level.failed + level.not_started) for level in levels]
    if any(failure_rates):
        axes.plot(places, failure_rates, marker="x", markersize=5, color=BAD, label="failed or not started")
    _show_loads(axes, levels)


def _show_loads(axes: Axes, levels: Sequence[Summary]) -> None:
    """Label the axis below with the loads of the levels."""
    is_closed = isinstance(levels[0].load, Closed)
    axes.set_xticks(range(len(levels)), [level.load.amount.removesuffix("/s") for level in levels])
    axes.set_xlabel("requests at once" if is_closed else "requests that come in a second", fontsize=8.5)
    axes.set_ylim(bottom=0)


def _distribution(axes: Axes, level: Summary, panel: Panel) -> None:
    """Draw for each value of a figure which share of the answers had at most that value."""
    for name in panel.names:
        figures = map(OF_ANSWERS[name], level.answers)
        values = np.sort([panel.scale * figure for figure in figures if figure is not None])
        if len(values):
            # The curve begins at 0, where no answer is, so there is one share more than there are values.
            shares = np.arange(len(values) + 1) / len(values)
            axes.step([0, *values], shares, where="post", color=COLOURS[name], label=_label(name))
    axes.set_ylabel("share of answers", fontsize=8.5)
    axes.set_ylim(0, 1.02)
    axes.set_xlim(left=0)


def _label(name: str) -> str:
    return name.removesuffix("_s").replace("_", " ")


def _dress(axes: Axes) -> None:
    """Set the colours, the grid and the legend of a diagram."""
    axes.tick_params(labelsize=8, labelcolor=FAINT, color=GRID)
    axes.xaxis.label.set_color(FAINT)
    axes.yaxis.label.set_color(FAINT)
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)
    axes.legend(fontsize=8, frameon=False, labelcolor=INK)
