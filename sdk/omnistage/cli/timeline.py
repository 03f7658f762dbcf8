"""The picture of one spoken answer: when each stage worked, when text and sound arrived, and when it was heard.

The time axis is the client's clock, seconds after t0. Stage reports count from the moment that the chain was opened, which the client does
not see. It is taken to be as late as it can be without anything arriving before it was made: that is right to the time that a message
takes to the client, about a millisecond.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from omnistage.client.events import Done, StageReport
from omnistage.client.playback import Played, Timing, play

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_IN, ROW_IN, DPI = 9.0, 0.62, 200
LEFT_IN, RIGHT_IN, TOP_IN, BOTTOM_IN = 1.02, 0.15, 0.62, 0.48

INK, FAINT, GRID = "#1f2933", "#697586", "#e4e7eb"
COLOURS = {"thinker": "#3b6fd4", "talker": "#8a4fc9", "code2wav": "#0f9d8a", "diffusion": "#c2571a"}
PLAYED = ("#f2a93b", "#f7c46f")
UNDERRUN = "#d92d20"
LONGEST = 3.0
"""The picture ends after this many times the work, so that a long answer does not squeeze it; the rest of the playback is told in words."""
BAR, TICK, MARK_BAND, TITLE_WORDS = 0.5, 0.14, 0.8, 40


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the picture: its name, and what it did in words."""

    name: str
    note: str


def draw(path: Path, done: Done, text: str) -> None:
    """Write the picture of an answer as PNG, 1800 pixels wide. text: what was said, for the title."""
    # Imported here, and without the global pyplot state: most calls never draw.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    timing = done.timing
    played = play(timing.audio)
    opened_s = opened_at(done)
    rows = [Row(stage.stage, _work(stage, timing)) for stage in done.usage.stages]
    if played:
        rows.append(Row("playback", f"{len(played)} chunks"))
    height_in = TOP_IN + BOTTOM_IN + ROW_IN * (len(rows) + MARK_BAND)
    figure = Figure(figsize=(WIDTH_IN, height_in), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    figure.subplots_adjust(LEFT_IN / WIDTH_IN, BOTTOM_IN / height_in, 1 - RIGHT_IN / WIDTH_IN, 1 - TOP_IN / height_in)
    axes = figure.add_subplot()
    for y, stage in enumerate(done.usage.stages):
        _draw_stage(axes, y, stage, opened_s)
        _draw_arrivals(axes, y, stage, timing)
    _draw_playback(axes, len(rows) - 1, played, timing.underrun_s)
    _draw_marks(axes, timing, len(rows))
    heard_s = max([timing.e2e_s, *(chunk.end_s for chunk in played)])
    shown_s = min(heard_s, LONGEST * timing.e2e_s)
    if heard_s > shown_s:
        _draw_rest(axes, len(rows) - 1, heard_s)
    _dress(axes, rows, shown_s)
    left = 0.12 / WIDTH_IN
    _write_title(figure, left, 1 - 0.1 / height_in, text)
    figure.text(left, 1 - 0.38 / height_in, _figures(done), fontsize=9.5, color=FAINT, va="top")
    figure.savefig(path, format="png", metadata={"Software": "omnistage"})


def opened_at(done: Done) -> float:
    """When the chain was opened, seconds after t0, as well as a client can tell."""
    latest = [done.timing.e2e_s]
    for stage in done.usage.stages:
        arrivals = _arrivals(stage, done.timing)
        if arrivals:
            latest += [arrivals[0] - stage.first_output_s, arrivals[-1] - stage.total_s]
    return max(done.usage.queued_s, min(latest))


def _arrivals(stage: StageReport, timing: Timing) -> list[float]:
    """When the client got what this stage made: text from the Thinker, sound from the Code2Wav, nothing from the others."""
    if "text" in stage.output_items:
        return [piece.arrival_s for piece in timing.text if piece.characters]
    if "audio" in stage.output_items:
        return [chunk.arrival_s for chunk in timing.audio]
    return []


def _draw_stage(axes: Axes, y: int, stage: StageReport, offset_s: float) -> None:
    """Light from open to the first output, solid from the first output to the last."""
    colour = COLOURS.get(stage.stage, FAINT)
    first_s, last_s = offset_s + stage.first_output_s, offset_s + stage.total_s
    axes.barh(y, first_s - offset_s, left=offset_s, height=BAR, color=colour, alpha=0.22, linewidth=0)
    axes.barh(y, last_s - first_s, left=first_s, height=BAR, color=colour, linewidth=0)


def _draw_arrivals(axes: Axes, y: int, stage: StageReport, timing: Timing) -> None:
    """Ticks under the stages that speak to the client."""
    low = y + BAR / 2 + 0.04
    axes.vlines(_arrivals(stage, timing), low, low + TICK, color=COLOURS.get(stage.stage, FAINT), linewidth=0.9)


def _draw_playback(axes: Axes, y: int, played: Sequence[Played], underrun_s: float) -> None:
    """Chunks in two shades, as a player that starts with the first chunk would play them; waits for a late chunk in red."""
    for i, chunk in enumerate(played):
        axes.barh(y, chunk.duration_s, left=chunk.start_s, height=BAR, color=PLAYED[i % 2], linewidth=0)
        if chunk.gap_s > 0:
            axes.barh(y, chunk.gap_s, left=chunk.start_s - chunk.gap_s, height=BAR, color=UNDERRUN, linewidth=0)
    if underrun_s > 0:
        _at_right_edge(axes, y, -17, f"{underrun_s:.2f} s of silence while waiting for sound", UNDERRUN)


def _draw_rest(axes: Axes, y: int, heard_s: float) -> None:
    """Words at the right edge for the playback that is not shown."""
    _at_right_edge(axes, y, 0, f"plays on until {heard_s:.1f} s  →", INK)


def _at_right_edge(axes: Axes, y: float, lift: float, text: str, colour: str) -> None:
    """Words that end at the right edge of a row. lift: points above its middle."""
    axes.annotate(
        text,
        (1, y),
        xycoords=("axes fraction", "data"),
        xytext=(-6, lift),
        textcoords="offset points",
        ha="right",
        va="center",
        fontsize=9,
        color=colour,
    )


def _draw_marks(axes: Axes, timing: Timing, rows: int) -> None:
    """Dashed lines for the first text and the first sound; their labels stand one above the other, so that they never meet."""
    for name, at_s, level in (("first text", timing.ttft_s, 1.0), ("first sound", timing.ttfa_s, 0.5)):
        if at_s is None:
            continue
        top = -0.5 - MARK_BAND * level
        axes.vlines(at_s, top, rows - 0.4, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
        axes.annotate(
            f"{name} {at_s * 1000:.0f} ms", (at_s, top), xytext=(4, 0), textcoords="offset points", fontsize=9, color=INK, va="top"
        )


def _dress(axes: Axes, rows: Sequence[Row], end_s: float) -> None:
    axes.set_xlim(0, end_s * 1.01)
    axes.set_ylim(len(rows) - 0.4, -0.6 - MARK_BAND)
    axes.set_yticks([])
    for y, row in enumerate(rows):
        for text, size, colour, lift in ((row.name, 10, INK, 5.5), (row.note, 8, FAINT, -6.5)):
            axes.annotate(
                text,
                (0, y),
                xycoords=("axes fraction", "data"),
                xytext=(-6, lift),
                textcoords="offset points",
                ha="right",
                va="center",
                fontsize=size,
                color=colour,
            )
    axes.set_xlabel("seconds after the question", fontsize=8.5, color=FAINT, loc="left", labelpad=2)
    legend = "light: until the first output    solid: first to last output    ticks: arrivals at the client"
    axes.annotate(
        legend,
        (1, 0),
        xycoords="axes fraction",
        xytext=(0, -21.5),
        textcoords="offset points",
        fontsize=8,
        color=FAINT,
        ha="right",
        va="center",
    )
    axes.tick_params(axis="x", labelsize=8.5, labelcolor=FAINT, color=GRID)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)


def _work(stage: StageReport, timing: Timing) -> str:
    """What a stage put out, in the unit that says most."""
    for port, unit in (("text", "tokens"), ("audio", ""), ("codes", "frames"), ("features", "frames"), ("image", "pictures")):
        if port in stage.output_items:
            return f"{stage.output_items[port]:,} {unit}" if unit else f"{timing.audio_s:.2f} s"
    return ", ".join(f"{count:,} {port}" for port, count in stage.output_items.items())


def _write_title(figure: Figure, x: float, y: float, text: str) -> None:
    """What was said, as many words as fit."""
    words = text.split()[:TITLE_WORDS]
    title = figure.text(x, y, "", fontsize=11.5, fontweight="bold", color=INK, va="top", parse_math=False)
    for count in range(len(words), 0, -1):
        title.set_text("“" + " ".join(words[:count]) + ("”" if count == len(text.split()) else " …”"))
        if title.get_window_extent().x1 < (WIDTH_IN - RIGHT_IN) * DPI:
            return


def _figures(done: Done) -> str:
    timing = done.timing
    parts = [f"{timing.audio_s:.2f} s of speech" if timing.audio_s else "no sound"]
    if timing.rtf is not None:
        parts += [f"real-time factor {timing.rtf:.2f}", "no gaps" if timing.is_continuous else f"gaps {timing.underrun_s:.2f} s"]
    parts.append(f"model {done.model}, seed {done.seed}")
    return "  ·  ".join(parts)
