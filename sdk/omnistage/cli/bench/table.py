"""Prints the result of a benchmark for people: a block for each level, and a table of all levels."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from omnistage.cli.bench.level import Closed
from omnistage.cli.bench.run import Result
from omnistage.cli.bench.summary import Summary
from omnistage.cli.console import Console

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
        parts = [f"asking {plan.where.address}", pipeline, ", ".join(dict.fromkeys(models)), plan.questions.prompts.told]
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
            self._console.print(_fitting(result.levels, self._console))

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


def _fitting(levels: Sequence[Summary], console: Console) -> Table:
    """The table of all levels with as many columns as fit, none of them cut."""
    unbounded = console.options.update(width=1000)
    rows = [_row(level) for level in levels]
    columns = [name for name in rows[0] if any(row[name] for row in rows)]
    for dropped in ("", *DROPPED):
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
    size = abs(value)
    digits = 0 if size >= 99.95 or not size else 1 if size >= 9.995 else 2 if size >= 0.9995 else 3
    return f"{value:.{digits}f}"
