"""Draws the timeline of one spoken answer: when each stage worked, when text and sound arrived, and when the sound was heard.

The time axis is the client's clock, in seconds after t0, the moment of the question. The reports of the stages count from the moment when
the chain was opened, which the client does not see. We take the latest moment at which it can have been opened: any later, and some output
would arrive before it was made. The error is the time that a message takes to the client, about a millisecond.

If a server was lost, the picture also shows when, which stages had to be opened again, and how much sound the player held to bridge the
pause."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnistage.cli.make.figures import pause, seed_text, sentence
from omnistage.client.events import (
    CONTINUITY_LIMIT_S,
    START_BUFFER_S,
    BufferLevel,
    Done,
    Failover,
    Played,
    StageReport,
    Timing,
    buffer_levels,
    play,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_IN, ROW_IN, DPI = 9.0, 0.62, 200
LEFT_IN, RIGHT_IN, TOP_IN, BOTTOM_IN, LINE_IN = 1.02, 0.15, 0.62, 0.48, 0.22

INK, FAINT, GRID = "#1f2933", "#697586", "#e4e7eb"
COLOURS = {"thinker": "#3b6fd4", "talker": "#8a4fc9", "code2wav": "#0f9d8a", "diffusion": "#c2571a"}
PLAYED = ("#f2a93b", "#f7c46f")
LOSS_COLOUR = "#d92d20"
LONGEST, LONGEST_WITH_LOSS = 3.0, 1.6
"""The time axis ends at this many times the duration of the answer: otherwise a long playback would squeeze the work of the stages. A text
then states how long the playback goes on."""
CUT_ABOVE = 2.5
"""The row of the buffer reaches up to this many times the highest level before a loss: a fast stack fills the buffer so far afterwards that
otherwise the loss would not be visible."""
BAR, BUFFER, TICK, MARK = 0.5, 0.8, 0.14, 0.4
"""Heights of a bar, of the curve of the buffer, of a tick and of the label of a mark, in rows."""
TITLE_WORDS, MARGIN = 40, 1.01
"""The most words of the title, and how far the time axis goes on, as a multiple of its end."""
MAX_LABELLED_LOSSES = 3
"""Losses with a label and a sentence; further ones are drawn without words."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the picture. name, note: written to the left of it; the note states the amount of work."""

    name: str
    note: str


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment that gets a dashed line with a label."""

    label: str
    at_s: float
    colour: str


def draw(path: Path, done: Done, text: str) -> None:
    """Write the picture of an answer as PNG, 1800 pixels wide. text: the words of the answer, for the title."""
    # Imported here, and without the global pyplot state, because most calls never draw.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    timing = done.timing
    # If a server was lost, the picture supposes a player with a buffer, and shows how the buffer bridged the loss.
    start_buffer_s = START_BUFFER_S if done.failovers else 0.0
    played = play(timing.audio, start_buffer_s, timing.prebuffer_s or 0.0)
    rows = [Row(stage.stage, _work(stage, timing)) for stage in done.usage.stages]
    if played:
        rows.append(Row("playback", f"{start_buffer_s:g} s buffer" if start_buffer_s else f"{len(played)} chunks"))
    heard_s = max([timing.e2e_s, *(chunk.end_s for chunk in played)])
    shown_s = min(heard_s, (LONGEST_WITH_LOSS if done.failovers else LONGEST) * timing.e2e_s)
    levels = buffer_levels(timing.audio) if done.failovers else []
    highest_level_s = max((level.buffered_s for level in levels if level.at_s <= shown_s), default=0.0)
    top_level_s = max(min(highest_level_s, CUT_ABOVE * _most_held_s(levels, done)), START_BUFFER_S)
    if levels:
        is_cut = top_level_s < highest_level_s
        rows.append(Row("buffer", f"cut at {top_level_s:.1f} s" if is_cut else f"up to {highest_level_s:.1f} s"))
    marks = _marks(done)
    loss_lines = [sentence(failover, timing) for failover in done.failovers[:MAX_LABELLED_LOSSES]]
    # Each loss has a line below the title; with losses the legend has a second line.
    top_in, bottom_in = TOP_IN + LINE_IN * len(loss_lines), BOTTOM_IN + LINE_IN * bool(loss_lines)
    height_in = top_in + bottom_in + ROW_IN * (len(rows) + MARK * len(marks))
    figure = Figure(figsize=(WIDTH_IN, height_in), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    figure.subplots_adjust(LEFT_IN / WIDTH_IN, bottom_in / height_in, 1 - RIGHT_IN / WIDTH_IN, 1 - top_in / height_in)
    axes = figure.add_subplot()
    _draw_stages(axes, done)
    if played:
        y = len(done.usage.stages)
        _draw_playback(axes, y, played)
        if heard_s > shown_s:
            _annotate(axes, f"plays on until {heard_s:.1f} s  →", (1, y), (-6, 0), INK)
    if levels:
        _draw_buffer(axes, len(rows) - 1, levels, done, top_level_s, shown_s)
    _draw_pauses(axes, done.failovers, len(rows))
    _draw_marks(axes, marks, len(rows), shown_s)
    _dress(axes, rows, len(marks), shown_s)
    _write_legend(axes, bool(loss_lines))
    # The places of these texts are inches from the left and upper edge, as shares of the figure, whose upper edge is at 1.
    left_margin = 0.12 / WIDTH_IN
    _write_title(figure, left_margin, 1 - 0.1 / height_in, text)
    figure.text(left_margin, 1 - 0.38 / height_in, _figures(done, played), fontsize=9.5, color=FAINT, va="top")
    for number, words in enumerate(loss_lines, start=1):
        figure.text(left_margin, 1 - (0.38 + LINE_IN * number) / height_in, words, fontsize=9.5, color=LOSS_COLOUR, va="top")
    figure.savefig(path, format="png", metadata={"Software": "omnistage"})


def opened_at(done: Done) -> float:
    """An estimate of when the chain was opened, in seconds after t0."""
    latest_times = []  # The chain was opened at each of them or earlier: no output arrives before it was made.
    for stage in done.usage.stages:
        if any(_losses(done, stage)):
            continue  # Skipped, because its times count from the moment when it was opened anew.
        latest_times.append(done.timing.e2e_s - stage.total_s)
        arrivals = _arrivals(stage, done.timing)
        if arrivals:
            latest_times += [arrivals[0] - stage.first_output_s, arrivals[-1] - stage.total_s]
    return max(done.usage.queued_s, min(latest_times, default=0.0))


def _losses(done: Done, stage: StageReport) -> Iterator[Failover]:
    """Yield the losses after which this stage was opened anew: of its own servers, of servers of an earlier stage, or of the router."""
    order = ["router", *(report.stage for report in done.usage.stages)]
    for failover in done.failovers:
        if failover.stage in order and order.index(failover.stage) <= order.index(stage.stage):
            yield failover


def _arrivals(stage: StageReport, timing: Timing) -> list[float]:
    """The moments when the client got output of a stage, in seconds after t0; empty for a stage that gives neither text nor sound."""
    if "text" in stage.output_items:
        return [piece.arrival_s for piece in timing.text if piece.characters]
    if "audio" in stage.output_items:
        return [chunk.arrival_s for chunk in timing.audio]
    return []


def _draw_stages(axes: Axes, done: Done) -> None:
    """Draw a row for each stage: the work that was lost, the other work, and when its output arrived."""
    opened_s = opened_at(done)
    for y, stage in enumerate(done.usage.stages):
        begin_s = opened_s
        for failover in _losses(done, stage):
            _draw_lost(axes, y, stage, begin_s, failover)
            begin_s = failover.arrival_s
        _draw_stage(axes, y, stage, begin_s)
        _draw_arrivals(axes, y, stage, done.timing)


def _draw_lost(axes: Axes, y: int, stage: StageReport, begin_s: float, failover: Failover) -> None:
    """Draw hatches from begin_s to a loss, and a cross there if a replica of this stage itself was lost."""
    colour = COLOURS.get(stage.stage, FAINT)
    axes.barh(
        y, max(failover.at_s - begin_s, 0.0), left=begin_s, height=BAR, color="white", edgecolor=colour, hatch="//////", linewidth=0.6
    )
    if failover.stage == stage.stage:
        axes.plot(failover.at_s, y, marker="X", markersize=9, color=LOSS_COLOUR, markeredgecolor="white", markeredgewidth=0.8, zorder=5)


def _draw_stage(axes: Axes, y: int, stage: StageReport, offset_s: float) -> None:
    """Draw a light bar from offset_s, when the stage was opened, to its first output, and a solid bar from there to its last output."""
    colour = COLOURS.get(stage.stage, FAINT)
    first_s, last_s = offset_s + stage.first_output_s, offset_s + stage.total_s
    axes.barh(y, first_s - offset_s, left=offset_s, height=BAR, color=colour, alpha=0.22, linewidth=0)
    axes.barh(y, last_s - first_s, left=first_s, height=BAR, color=colour, linewidth=0)


def _draw_arrivals(axes: Axes, y: int, stage: StageReport, timing: Timing) -> None:
    """Draw ticks below the bar of a stage, one for each arrival of its output at the client."""
    top = y + BAR / 2 + 0.04
    axes.vlines(_arrivals(stage, timing), top, top + TICK, color=COLOURS.get(stage.stage, FAINT), linewidth=0.9)


def _draw_playback(axes: Axes, y: int, played: Sequence[Played]) -> None:
    """Draw the chunks as a player would play them, in two shades in turn, and in red the silence before each late chunk."""
    for i, chunk in enumerate(played):
        axes.barh(y, chunk.duration_s, left=chunk.start_s, height=BAR, color=PLAYED[i % 2], linewidth=0)
        if chunk.gap_s > 0:
            axes.barh(y, chunk.gap_s, left=chunk.start_s - chunk.gap_s, height=BAR, color=LOSS_COLOUR, linewidth=0)
    silence_s = sum(chunk.gap_s for chunk in played)
    if silence_s > 0:
        _annotate(axes, f"{silence_s:.2f} s of silence while waiting for sound", (1, y), (-6, -17), LOSS_COLOUR)


def _draw_buffer(axes: Axes, y: int, levels: Sequence[BufferLevel], done: Done, top_s: float, shown_s: float) -> None:
    """Draw how much sound the player held and had not played yet, as an area along the time axis, with a dot at the lowest level after each
    loss. y: the row. top_s: seconds of sound at the top of the row. shown_s: the end of the time axis."""
    from matplotlib.patches import Rectangle

    base, scale = y + BUFFER / 2, BUFFER / top_s  # The axis of the rows points downwards: a higher level has a smaller y.
    times_s = [level.at_s for level in levels]
    heights = [base - scale * level.buffered_s for level in levels]
    frame = Rectangle((0, base - BUFFER - 0.02), shown_s * MARGIN, BUFFER + 0.04, transform=axes.transData)
    axes.fill_between(times_s, base, heights, color=PLAYED[0], alpha=0.28, linewidth=0).set_clip_path(frame)
    (line,) = axes.plot(times_s, heights, color=PLAYED[0], linewidth=1.3)
    line.set_clip_path(frame)
    for failover in done.failovers[:MAX_LABELLED_LOSSES]:
        low = _lowest(levels, failover, done.timing)
        if low is not None:
            height = scale * low.buffered_s
            at = (low.at_s, base - height)
            axes.plot(*at, marker="o", markersize=4.5, color=LOSS_COLOUR, zorder=5)
            words = f"{low.buffered_s:.2f} s left" if low.buffered_s else "empty"
            # Below the curve, which rises from here; above if there is no room below.
            lift = -9 if height > BUFFER / 4 else 9
            _annotate(axes, words, at, (7, lift), LOSS_COLOUR, xycoords="data", ha="left")


def _most_held_s(levels: Sequence[BufferLevel], done: Done) -> float:
    """The most seconds of sound that the player held at any time up to the last loss; 0 without a loss."""
    last_s = max((failover.at_s for failover in done.failovers), default=0.0)
    return max((level.buffered_s for level in levels if level.at_s <= last_s), default=0.0)


def _lowest(levels: Sequence[BufferLevel], failover: Failover, timing: Timing) -> BufferLevel | None:
    """The lowest level of the player's buffer between a loss and the next sound that arrived; None if the player had not begun to play, or
    no more sound came."""
    next_s = next((chunk.arrival_s for chunk in timing.audio if chunk.samples and chunk.arrival_s >= failover.arrival_s), None)
    began_s = next((chunk.start_s for chunk in play(timing.audio, START_BUFFER_S)), None)
    if next_s is None or began_s is None or began_s > failover.at_s:
        return None
    # `levels` has two entries for the moment when that sound arrives: just before it, and just after.
    during = [level for level in levels if failover.at_s <= level.at_s <= next_s]
    return min(during, key=lambda level: level.buffered_s, default=None)


def _draw_pauses(axes: Axes, failovers: Sequence[Failover], rows: int) -> None:
    """Draw a red band through all rows from each loss until the answer went on."""
    for failover in failovers:
        axes.fill_betweenx([-0.5, rows - 0.4], failover.at_s, failover.arrival_s, color=LOSS_COLOUR, alpha=0.14, linewidth=0, zorder=0)


def _annotate(
    axes: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], colour: str, size: float = 9, **place: Any
) -> None:
    """Write words that end at `at`, by default (0, y) for the left edge of row y and (1, y) for its right edge. offset: points to the right
    and up from there. place: other settings of matplotlib for `at` and for the alignment."""
    settings: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "center", **place}
    axes.annotate(text, at, xytext=offset, textcoords="offset points", fontsize=size, color=colour, **settings)


def _marks(done: Done) -> list[Moment]:
    """The moments to mark, in the order of their labels from the top: the first text and the first sound, then the losses."""
    timing = done.timing
    firsts = (("first text", timing.ttft_s), ("first sound", timing.ttfa_s))
    marks = [Moment(f"{name} {at_s * 1000:.0f} ms", at_s, INK) for name, at_s in firsts if at_s is not None]
    for failover in done.failovers[:MAX_LABELLED_LOSSES]:
        marks.append(Moment(f"{failover.stage} lost, went on after {pause(failover)}", failover.at_s, LOSS_COLOUR))
    return marks


def _draw_marks(axes: Axes, marks: Sequence[Moment], rows: int, shown_s: float) -> None:
    """Draw a dashed line for each mark. Each label has a height of its own, so that labels never meet. rows: number of rows."""
    for number, mark in enumerate(marks):
        top = -0.5 - MARK * (len(marks) - number)  # The first row begins at -0.5; the labels stand above it.
        at_left = mark.at_s > 0.7 * shown_s
        axes.vlines(mark.at_s, top, rows - 0.4, color=mark.colour, linewidth=0.9, linestyle=(0, (4, 3)))
        x, side = (-4, "right") if at_left else (4, "left")
        _annotate(axes, mark.label, (mark.at_s, top), (x, 0), mark.colour, xycoords="data", ha=side, va="top")


def _dress(axes: Axes, rows: Sequence[Row], marks: int, end_s: float) -> None:
    """Set the limits of the axes, and write the names of the rows. marks: number of labels above the rows. end_s: end of the time axis."""
    axes.set_xlim(0, end_s * MARGIN)
    axes.set_ylim(len(rows) - 0.4, -0.6 - MARK * marks)
    axes.set_yticks([])
    for y, row in enumerate(rows):
        for text, size, colour, lift in ((row.name, 10, INK, 5.5), (row.note, 8, FAINT, -6.5)):
            _annotate(axes, text, (0, y), (-6, lift), colour, size)
    axes.set_xlabel("seconds after the question", fontsize=8.5, color=FAINT, loc="left", labelpad=2)
    axes.tick_params(axis="x", labelsize=8.5, labelcolor=FAINT, color=GRID)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GRID)


def _write_legend(axes: Axes, with_losses: bool) -> None:
    """Write below the axis how to read the picture."""
    lines = ["light: until the first output    solid: first to last output    ticks: arrivals at the client"]
    if with_losses:
        lines.append("hatched: before the loss    red: from the loss until it went on    buffer: sound received, not yet played")
    for number, line in enumerate(lines):
        _annotate(axes, line, (1, 0), (0, -21.5 - 15 * number), FAINT, 8, xycoords="axes fraction")


def _work(stage: StageReport, timing: Timing) -> str:
    """The amount of a stage's output in words, in the most useful unit."""
    for port, unit in (("text", "tokens"), ("audio", ""), ("codes", "frames"), ("features", "frames"), ("image", "pictures")):
        if port in stage.output_items:
            return f"{stage.output_items[port]:,} {unit}" if unit else f"{timing.audio_s:.2f} s"
    return ", ".join(f"{count:,} {port}" for port, count in stage.output_items.items())


def _write_title(figure: Figure, x: float, y: float, text: str) -> None:
    """Write the title: as many words of the answer as fit on one line."""
    words = text.split()[:TITLE_WORDS]
    title = figure.text(x, y, "", fontsize=11.5, fontweight="bold", color=INK, va="top", parse_math=False)
    for count in range(len(words), 0, -1):
        title.set_text("“" + " ".join(words[:count]) + ("”" if count == len(text.split()) else " …”"))
        if title.get_window_extent().x1 < (WIDTH_IN - RIGHT_IN) * DPI:
            return


def _figures(done: Done, played: Sequence[Played]) -> str:
    """The line of figures below the title."""
    timing = done.timing
    parts = [f"{timing.audio_s:.2f} s of speech" if timing.audio_s else "no sound"]
    if timing.rtf is not None:
        silence_s = sum(chunk.gap_s for chunk in played)
        parts += [f"real-time factor {timing.rtf:.2f}", "no gaps" if silence_s <= CONTINUITY_LIMIT_S else f"gaps {silence_s:.2f} s"]
    parts.append(", ".join([f"pipeline {done.pipeline}", *seed_text(done)]))
    return "  ·  ".join(parts)
