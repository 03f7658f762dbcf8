"""Draws a benchmark: with several levels how figures change with the load, with one level how their values are distributed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from omnistage.cli.bench.level import Closed
from omnistage.cli.bench.run import Result
from omnistage.cli.bench.summary import OF_ANSWERS, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
WHOLE = Panel("whole answer, ms", ("e2e_s",))
RTF = Panel("real-time factor", ("rtf", "rtf_generation"), 1.0)
PANELS = (FIRSTS, WHOLE, Panel("requests a second"), RTF)
PANELS_OF_ONE = (FIRSTS, WHOLE, Panel("time per token, ms", ("tpot_s",)), RTF)


def draw(path: Path, result: Result, kind: str) -> None:
    """Write the picture; as PNG it is 1500 pixels wide. result: with at least one level. kind: png or svg, whatever the path ends in."""
    # Imported here, and without the global pyplot state, because most runs never draw.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    levels = result.levels
    panels = [panel for panel in (PANELS if len(levels) > 1 else PANELS_OF_ONE) if panel.is_known(levels)]
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
    figure.text(0.12 / WIDTH_IN, 1 - 0.12 / height_in, _title(result), va="top", fontsize=10.5, color=INK, parse_math=False)
    figure.tight_layout(rect=(0, 0, 1, 1 - TITLE_IN / height_in))
    figure.savefig(path, format=kind)


def _title(result: Result) -> str:
    """The title: pipeline, load, prompts, and number of answers."""
    questions = result.plan.questions
    pipelines = dict.fromkeys(stage.pipeline for stage in result.stages)
    name = questions.options.get("pipeline") or ", ".join(pipelines)
    load = str(result.levels[0].load) if len(result.levels) == 1 else f"{len(result.levels)} levels of load"
    return f"{name} · {load} · {questions.prompts.told} · {result.completed} answers"


def _over_load(axes: Axes, levels: Sequence[Summary], panel: Panel) -> None:
    """Draw each figure over the levels: its median as a line, and the area from there to the 99th percentile."""
    for name in panel.names:
        values_at = [(place, level.figures[name]) for place, level in enumerate(levels) if name in level.figures]
        if not values_at:
            continue
        places = [place for place, _ in values_at]
        medians, highs = ([panel.scale * getattr(values, which) for _, values in values_at] for which in ("median", "p99"))
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
        values = np.sort([panel.scale * value for answer in level.answers if (value := OF_ANSWERS[name](answer)) is not None])
        if len(values):
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
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GRID)
    axes.legend(fontsize=8, frameon=False, labelcolor=INK)
