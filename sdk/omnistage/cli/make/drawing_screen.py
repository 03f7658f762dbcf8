"""Shows the progress of a drawing, a film or a sound of a prompt: in a few lines, or live on a terminal, with small previews if it has 24
bits of colour: each cell has two pixels, one above the other.

All of it goes to stderr, and the drawing goes on even if nobody reads it."""

from __future__ import annotations

import io
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from rich.text import Text

from omnistage.cli.console import Console
from omnistage.cli.make.screen import ERASE_BELOW, Below, Screen, write_raw
from omnistage.client.events import AudioChunk, Event, Picture, Progress, VideoDelta

if TYPE_CHECKING:
    from PIL.Image import Image


BAR_CELLS = 24
TOLD_PARTS = 4
"""The most lines of progress in a file or pipe."""

ROWS_BESIDE = 3
"""Rows of the window that stay free below a picture."""


class PlainDrawing(Screen):
    """Prints a line for each quarter of the steps: for pipes, files and simple terminals."""

    def show(self, event: Event) -> None:
        if isinstance(event, Progress) and event.total:
            part, part_before = (steps * TOLD_PARTS // event.total for steps in (event.done, event.done - 1))
            if event.done and part > part_before:
                with suppress(OSError):
                    write_raw(sys.stderr, f"step {event.done} of {event.total}\n")


class LiveDrawing(Screen):
    """Draws a line of progress, and above it the newest preview. has_colours: the terminal can show pictures."""

    def __init__(self, has_colours: bool) -> None:
        self._below = Below(sys.stderr)
        self._has_colours = has_colours
        self._begin_s = time.monotonic()
        self._line = Text("drawing", style="dim")
        self._frames, self._audio_s = 0, 0.0
        self._shown = (0, 0, 0)
        """Rows of the picture that stands above the cursor, and columns and rows of the window when it was drawn."""

    def __enter__(self) -> Self:
        with suppress(OSError):
            self._below.draw("", self._line)
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):
            self._below.erase()

    def show(self, event: Event) -> None:
        seconds = time.monotonic() - self._begin_s
        with suppress(OSError):
            match event:
                case Progress():
                    self._show_line(progress_line(event.done, event.total, seconds))
                case VideoDelta():
                    self._frames += event.frames
                    self._show_line(Text(f"{frames_text(self._frames)} · {seconds:.1f} s", style="dim"))
                case AudioChunk():
                    self._audio_s += event.duration_s
                    self._show_line(Text(f"{self._audio_s:.1f} s of sound · {seconds:.1f} s", style="dim"))
                case Picture() if self._has_colours and self._below.is_in_foreground():
                    self._show_picture(event.data)

    def _show_line(self, line: Text) -> None:
        """Draw another line in place of the one before."""
        self._line = line
        self._below.erase()
        self._below.draw("", line)

    def _show_picture(self, data: bytes) -> None:
        """Draw an encoded picture above the line, over the one before."""
        self._below.erase()
        columns, rows = self._below.columns, self._below.rows
        try:
            lines = cells(data, columns - 1, rows - ROWS_BESIDE)
        except ModuleNotFoundError:
            self._has_colours, lines = False, []
            write_raw(sys.stderr, "previews are shown with the package pillow, which is not installed: pip install pillow\n")
        if lines:
            # Draw over the earlier picture, unless the window has changed: then the place of that picture is unknown.
            height, *size = self._shown
            write_raw(sys.stderr, f"\x1b[{height}A\r{ERASE_BELOW}" if height and size == [columns, rows] else "")
            write_raw(sys.stderr, "".join(f"{line}\n" for line in lines))
            self._shown = (len(lines), columns, rows)
        self._below.draw("", self._line)


def frames_text(frames: int) -> str:
    """A number of frames in words."""
    return f"{frames} frame{'s' * (frames != 1)}"


def progress_line(done: int, total: int, seconds: float) -> Text:
    """The line of progress: a bar, the step, and the seconds so far. total: number of steps; 0: not known, so there is no bar."""
    if not total:
        return Text(f"drawing step {done} · {seconds:.1f} s", style="dim")
    bar = "━" * min(BAR_CELLS, BAR_CELLS * done // total)
    return Text.assemble(
        ("drawing ", "dim"), (bar, "cyan"), ("━" * (BAR_CELLS - len(bar)), "dim"), (f" step {done} of {total} · {seconds:.1f} s", "dim")
    )


def drawing_screen_for(as_json: bool) -> Screen:
    """The screen that fits stderr."""
    if as_json:
        return Screen()
    console = Console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal or not sys.stderr.isatty():
        return PlainDrawing()
    return LiveDrawing(has_colours=console.color_system == "truecolor" and not console.no_color)


MAX_COLUMNS, MAX_ROWS = 48, 24

UPPER_HALF = "▀"
RESET = "\x1b[0m"

FORMATS = ("PNG", "JPEG", "WEBP")
BACKGROUND = (96, 96, 96)
"""The colour on which transparent pixels are shown: red, green, blue."""


def cells(data: bytes, columns: int, rows: int) -> list[str]:
    """A picture as lines of text for a terminal with 24 bits of colour; no lines if it cannot be decoded. data: PNG, JPEG or WebP. columns,
    rows: the largest size. Smaller pictures are not enlarged. Raises ModuleNotFoundError without Pillow."""
    if columns < 1 or rows < 1:
        return []
    from PIL import Image

    try:
        image = _flatten(Image.open(io.BytesIO(data), formats=FORMATS))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return []
    image.thumbnail((min(columns, MAX_COLUMNS), 2 * min(rows, MAX_ROWS)))
    width, height = image.size
    pixels = image.tobytes()
    colours = [";".join(map(str, pixels[at : at + 3])) for at in range(0, 3 * width * height, 3)]
    lines = []
    for top in range(0, height, 2):
        upper = colours[top * width : (top + 1) * width]
        # A picture of odd height has no pixels below its last row: 49 is the background of the terminal.
        lower = [f"48;2;{colour}" for colour in colours[(top + 1) * width : (top + 2) * width]] or ["49"] * width
        line = "".join(f"\x1b[38;2;{above};{below}m{UPPER_HALF}" for above, below in zip(upper, lower, strict=True))
        lines.append(f"{line}{RESET}")
    return lines


def picture_size(data: bytes) -> tuple[int, int] | None:
    """Width and height of an encoded picture in pixels, from its head; None without Pillow, and for a picture that Pillow cannot read."""
    try:
        from PIL import Image
    except ModuleNotFoundError:
        return None
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS).size
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None


def _flatten(image: Image) -> Image:
    """The picture as RGB, with BACKGROUND in place of what is transparent."""
    from PIL import Image as images

    layer = image.convert("RGBA")
    background = images.new("RGBA", layer.size, BACKGROUND)
    background.alpha_composite(layer)
    return background.convert("RGB")
