"""Shows the progress of a drawing, a film or a sound of a prompt, and reports at its end. Progress is not shown at all, in a few lines, or
live on a terminal, with small previews if it has 24 bits of colour: each cell has two pixels, one above the other.

Everything but the report of --json goes to stderr, and the drawing goes on even if nobody reads it."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Self

from rich.text import Text

from omnistage.cli.console import Console
from omnistage.cli.make.figures import SEPARATOR, loss_as_object, remarks, seed_told, sentence, server_facts, tell
from omnistage.cli.make.screen import ERASE_BELOW, Below
from omnistage.client.errors import ProtocolError
from omnistage.client.events import Done, Event, Progress
from omnistage.host.terminal import stream_below

if TYPE_CHECKING:
    from PIL.Image import Image


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

    def show_amount(self, text: str) -> None:
        """Called when a piece of a film or a sound has come. text: how much there is now, in words."""


class PlainDrawing(DrawingScreen):
    """Prints a line for each quarter of the steps: for pipes, files and simple terminals."""

    def progress(self, done: int, total: int) -> None:
        # This step completes a part that the step before it did not complete.
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

    def show_amount(self, text: str) -> None:
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


async def follow(events: AsyncGenerator[Event, None], screen: DrawingScreen, take: Callable[[Event], None]) -> tuple[int, Done]:
    """Show the progress; returns how many steps were done, and the last event, `Done`. take: called with every other event. Raises
    ProtocolError if `Done` does not come."""
    steps = 0
    async with aclosing(events):
        with screen:
            async for event in events:
                match event:
                    case Progress():
                        steps = event.done
                        screen.progress(event.done, event.total)
                    case Done():
                        return steps, event
                    case _:
                        take(event)
    raise ProtocolError("the stream ended without its account")


def report(facts: Mapping[str, object], figures: Sequence[str], steps: int, done: Done, *, as_json: bool) -> None:
    """Print the result: with `as_json` one object for scripts, which begins with `facts`; else lines for people: the servers that were
    lost, a line that begins with `figures`, and the servers' remarks. steps: how many were done."""
    if as_json:
        losses = [loss_as_object(failover) for failover in done.failovers]
        end = {"e2e_s": round(done.timing.e2e_s, 6), "steps": steps or None, "seed": done.seed, "pipeline": done.pipeline}
        print(json.dumps({**facts, **end, "failovers": losses, **server_facts(done)}, ensure_ascii=False), flush=True)
        return
    parts = (*figures, f"{steps} steps" if steps else "", f"pipeline {done.pipeline}", seed_told(done))
    tell(*(sentence(failover, done.timing) for failover in done.failovers), SEPARATOR.join(filter(None, parts)), *remarks(done))


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
