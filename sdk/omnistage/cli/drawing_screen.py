"""Shows the progress of a drawing: not at all, in a few lines, or live on a terminal, with small previews if it has 24 bits of colour.

Everything goes to stderr, and the drawing goes on even if nobody reads it.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import Self

from rich.text import Text

from omnistage.cli.console import Console
from omnistage.cli.picture_cells import cells
from omnistage.cli.screen import ERASE_BELOW, Below
from omnistage.host.terminal import stream_below

BAR_CELLS = 24
TOLD_PARTS = 4
"""The most lines of progress in a file or pipe."""

ROWS_BESIDE = 3
"""Rows of the window that stay free below a picture."""


class DrawingScreen:
    """The base of all screens; a screen shows a drawing inside its `with` block. This one shows nothing, for --json."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def progress(self, done: int, total: int) -> None:
        """Called when a step is done. done, total: numbers of steps; total 0: it is not known."""

    def picture(self, data: bytes) -> None:
        """Called when a preview or a finished picture has come. data: the encoded picture."""

    def came(self, text: str) -> None:
        """Called when a piece of a film or a sound has come. text: how much there is now, in words."""


class PlainDrawing(DrawingScreen):
    """Prints a line for each quarter of the steps: for pipes, files and simple terminals."""

    def progress(self, done: int, total: int) -> None:
        if total and done and done * TOLD_PARTS // total > (done - 1) * TOLD_PARTS // total:
            _write(f"step {done} of {total}\n")


class LiveDrawing(DrawingScreen):
    """Draws a line of progress, and above it the newest preview. has_colours: the terminal can show pictures."""

    def __init__(self, has_colours: bool) -> None:
        self._below = Below(sys.stderr)
        self._has_colours = has_colours
        self._begin = time.monotonic()
        self._line = Text("drawing", style="dim")
        self._shown = (0, 0, 0)
        """Rows of the picture that stands above the cursor, and columns and rows of the window when it was drawn."""

    def __enter__(self) -> Self:
        self._draw()
        return self

    def __exit__(self, *error: object) -> None:
        self._erase()

    def progress(self, done: int, total: int) -> None:
        self._line = progress_line(done, total, time.monotonic() - self._begin)
        self._erase()
        self._draw()

    def came(self, text: str) -> None:
        self._line = Text(f"{text} · {time.monotonic() - self._begin:.1f} s", style="dim")
        self._erase()
        self._draw()

    def picture(self, data: bytes) -> None:
        if not self._has_colours:
            return
        with suppress(OSError):
            if not self._below.is_in_foreground():
                return
            self._below.erase()
            columns, rows = self._below.columns, self._below.rows
            try:
                lines = cells(data, columns - 1, rows - ROWS_BESIDE)
            except ModuleNotFoundError:
                self._has_colours, lines = False, []
                _write("previews are shown with the package pillow, which is not installed: pip install pillow\n")
            if lines:
                # Draw over the earlier picture, unless the window has changed: then the place of that picture is unknown.
                height, *size = self._shown
                _write(f"\x1b[{height}A\r{ERASE_BELOW}" if height and size == [columns, rows] else "")
                _write("".join(f"{line}\n" for line in lines))
                self._shown = (len(lines), columns, rows)
        self._draw()

    def _draw(self) -> None:
        with suppress(OSError):
            self._below.draw("", self._line)

    def _erase(self) -> None:
        with suppress(OSError):
            self._below.erase()


def progress_line(done: int, total: int, seconds: float) -> Text:
    """The line of progress: a bar, the step, and the seconds so far. total: number of steps; 0: not known, so there is no bar."""
    if not total:
        return Text(f"drawing step {done} · {seconds:.1f} s", style="dim")
    bar = "━" * min(BAR_CELLS, BAR_CELLS * done // total)
    return Text.assemble(
        ("drawing ", "dim"), (bar, "cyan"), ("━" * (BAR_CELLS - len(bar)), "dim"), (f" step {done} of {total} · {seconds:.1f} s", "dim")
    )


def drawing_screen_for(as_json: bool) -> DrawingScreen:
    """The screen that fits stderr."""
    if as_json:
        return DrawingScreen()
    console = Console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal or not sys.stderr.isatty():
        return PlainDrawing()
    return LiveDrawing(has_colours=console.color_system == "truecolor" and not console.no_color)


def _write(text: str) -> None:
    """Write text to stderr with control sequences that the terminal is to obey. Only the colours of pictures in it come from others."""
    with suppress(OSError):
        terminal = stream_below(sys.stderr)
        terminal.write(text)
        terminal.flush()
